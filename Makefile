# Everything happens in .venv; `make setup` builds it and every other target calls that first.
# Needs: Python 3.11 or newer and make. No compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Torch goes in first and pinned: a plain "torch", wanted by another package, would bring the CUDA build (several GB)
# where a CPU build of this release is offered. For CUDA: make setup TORCH="torch>=2.11".
TORCH ?= torch==2.13.0

.DELETE_ON_ERROR:
.PHONY: setup fmt check test bench demo docs loc clean

setup: $(READY)

# Made again when the dependencies change, not when the code does: the install is editable.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

fmt: setup
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# All tiers but gpu; what CI runs. TESTS="tests/unit -k scheduler" runs a part.
TESTS ?=
test: setup
	$(BIN)/pytest $(TESTS)

# The main job on the real model: pull, serve, chat completions, tokens per second, peak memory.
demo: setup
	$(BIN)/python examples/demo.py

bench: setup
	$(BIN)/python benchmarks/cpu_reference.py

# docs/reference from the code.
docs: setup
	$(BIN)/python tools/reference_docs.py

loc: setup
	$(BIN)/python tools/lines_of_code.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
