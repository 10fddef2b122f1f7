# Every target works alone on a fresh machine: it makes .venv and installs what it needs, once.
#
#   make demo    decode long prompts on both tiny models, verified, and ask the trained one about long texts
#   make test    everything that CI runs
#   make check   the same: lint, types, import order, tests
#   make lint    the parts of check that run no test
#   make format  let ruff rewrite what it can
#   make clean   remove .venv and everything that was built
#
# PYTHON=...      the interpreter to build .venv from (3.11 or newer)
# PIP_FLAGS=...   further flags for pip, such as the index that carries CPU builds of torch
# PYTEST_FLAGS=.. further flags for pytest

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt $(PIP_FLAGS)
TORCH := $(shell grep '^torch==' constraints.txt)
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
CODE := $(wildcard src tests tools benchmarks examples)

# Two cores, two test processes: a process that starts a thread per core would only slow the other down.
PYTEST_WORKERS ?= 2
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.DELETE_ON_ERROR:
.PHONY: demo test check lint types imports tests format clean

demo: $(RUN_STAMP)
	$(BIN)/python tools/demo.py

test: check

check: lint types imports tests

lint: $(DEV_STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(DEV_STAMP)
	$(BIN)/mypy

imports: $(DEV_STAMP)
	$(BIN)/lint-imports --no-cache

# Last and after the quick checks, so that a run ends with pytest's own closing line.
tests: $(DEV_STAMP) | lint types imports
	$(TEST_ENV) $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_FLAGS)

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone, so that the build that the constraints name is chosen before anything asks for torch.
$(RUN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing hisparse and what it runs on (a few minutes the first time)"
	$(PIP_INSTALL) $(TORCH)
	$(PIP_INSTALL) --editable .
	touch $@

$(DEV_STAMP): pyproject.toml constraints.txt $(RUN_STAMP)
	@echo "installing the development tools"
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@

$(BIN)/python:
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    echo "creating $(VENV) with $$($$python --version)"; \
	    rm -rf $(VENV); \
	    $$python -m venv $(VENV) && exit 0; \
	    rm -rf $(VENV); \
	    echo "$$python cannot make a virtual environment: install its venv package (python3-venv on Debian)" >&2; exit 1; \
	  fi; \
	done; \
	echo "no Python 3.11 or newer found (python3 is $$(python3 --version 2>&1)): install one, or name it: make PYTHON=..." >&2; \
	exit 1
