# `make demo` and `make test` each work from a fresh clone: they make .venv and install into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2

.PHONY: help install demo check test test-all clean

help:
	@echo "make demo      train a small Memory Mosaic with four kernels (about 4 minutes)"
	@echo "make check     ruff and mypy"
	@echo "make test      check, then the tests"
	@echo "make test-all  the tests with the slow sweeps"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard parzen/csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lab,test]'
	touch $@

# Threads that wait for a core taken by another program must not spin.
demo: $(STAMP)
	OMP_WAIT_POLICY=passive $(BIN)/parzen demo $(DEMO)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/pytest -n $(WORKERS) -m "not slow"

test-all: check
	$(BIN)/pytest -n $(WORKERS)

clean:
	rm -rf $(VENV) build dist
