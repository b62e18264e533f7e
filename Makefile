# Everything happens in .venv; `make setup` builds it and every other target calls that first.
# Needs: Python 3.11 or newer and make. With a C++ compiler (GCC 11, Clang 14 or newer) the native kernels are built, too.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NATIVE := $(VENV)/.native
SOURCES := CMakeLists.txt $(wildcard csrc/*.* csrc/simd/*)
BUILD_TOOLS := "scikit-build-core>=0.11" "nanobind>=2.4" "cmake>=3.18" ninja
INSTALL := $(BIN)/python -m pip install --no-build-isolation
# Torch goes in first and pinned: a plain "torch", wanted by another package, would bring the CUDA build (several GB)
# where a CPU build of this release is offered. For CUDA: make setup TORCH="torch>=2.11".
TORCH ?= torch==2.13.0

.DELETE_ON_ERROR:
.PHONY: setup native sanitize fmt check test clients bench demo docs loc clean

setup: $(READY) $(NATIVE)

# Made again when the dependencies change, not when Python code does: the install is editable.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet $(BUILD_TOOLS)
	$(INSTALL) --quiet --editable ".[dev]"
	touch $@ $(NATIVE)

# The module again after its sources changed; only the changed files are compiled.
$(NATIVE): $(SOURCES) | $(READY)
	$(INSTALL) --quiet --no-deps --editable .
	touch $@

# The same, with the compiler's output, and an error where setup would go on without the module.
native: $(READY)
	$(INSTALL) --verbose --no-deps --editable .
	$(BIN)/python -c "import triblade._native"
	touch $(NATIVE)

# The kernels and the thread team under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.
sanitize: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" csrc/tests/sanitize.sh

fmt: setup
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# All tiers but gpu; what CI runs, a process for each core. TESTS="tests/unit -k scheduler" runs a part.
TESTS ?=
test: setup
	$(BIN)/pytest --numprocesses auto --dist loadfile $(TESTS)

# The programs of docs/guides/clients.md against a server on the demo model; results are what the guide shows.
clients: setup
	$(BIN)/python tools/clients.py --output benchmarks/results/clients.json

# The whole story on the real model: pull, convert, plan, serve, chat, load test, tune, report.
demo: setup
	$(BIN)/python examples/demo.py

bench: setup
	$(BIN)/python benchmarks/cpu_reference.py

# docs/reference from the code, docs/guides/clients.md from the clients that are tested.
docs: setup
	$(BIN)/python tools/reference_docs.py
	$(BIN)/python tools/clients_page.py

loc: setup
	$(BIN)/python tools/lines_of_code.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
