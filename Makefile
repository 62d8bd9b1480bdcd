# `make demo` and `make test` each work from a fresh clone: they make .venv and install into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2

.PHONY: help install demo check test test-all docs engine gpu-compile test-neon test-sanitize clean

help:
	@echo "make demo      train a small Memory Mosaic with four kernels (about 4 minutes)"
	@echo "make check     ruff and mypy"
	@echo "make test      check, then the tests"
	@echo "make test-all  the tests with the slow sweeps, and gpu-compile"
	@echo "make docs      the site, in build/site; a warning is an error"
	@echo "make gpu-compile  compile the Triton kernels for three GPUs, without one (6 minutes)"
	@echo "make engine    build the CPU engine in place; make test-neon, test-sanitize check it further"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard parzen/csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@owner="$$($(BIN)/python -m pip show parzen 2>/dev/null | sed -n 's/^Editable project location: //p')"; \
	if test -d "$$owner" && ! test "$$owner" -ef .; then \
		echo "$(VENV) belongs to the checkout $$owner and is left alone: remove it here (rm $(VENV)) or give" \
			"another, make VENV=.venv-own $(MAKECMDGOALS)"; exit 1; fi
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs,lab,test]'
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

test-all: check gpu-compile
	$(BIN)/pytest -n $(WORKERS)

docs: $(STAMP)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --jobs auto \
		--doctree-dir build/doctrees --conf-dir docs . build/site
	@echo "open build/site/index.html"

# The engine in place, for work on csrc without installing again.
engine:
	cmake -S . -B build/engine && cmake --build build/engine -j && cmake --install build/engine --prefix .

# The Triton kernels as cubins, on a machine without a GPU: fails where one spills registers.
gpu-compile: $(STAMP)
	$(BIN)/python -m parzen.backends.triton.build

# Needs g++-aarch64-linux-gnu and qemu-user.
test-neon:
	cmake -S . -B build/neon -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
	cmake --build build/neon --target selftest
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/neon/selftest

SANITIZED := build/sanitize/engine.so
PRELOAD = $(shell gcc -print-file-name=libasan.so) $(shell gcc -print-file-name=libubsan.so)

# Addresses and undefined behaviour on the conformance tests, then data races on the self-test.
test-sanitize: $(STAMP)
	cmake -S . -B build/sanitize -DPARZEN_SANITIZE=address,undefined -DPARZEN_ISAS=avx512vnni
	cmake --build build/sanitize --target parzen_engine
	PARZEN_ENGINE=$(SANITIZED) LD_PRELOAD="$(PRELOAD)" UBSAN_OPTIONS=halt_on_error=1 \
		ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:handle_segv=0 \
		$(BIN)/pytest -s -q -p no:xdist -k "cpu and float32" tests/test_conformance.py
	cmake -S . -B build/tsan -DPARZEN_SANITIZE=thread -DPARZEN_ISAS=avx512
	cmake --build build/tsan --target selftest
	setarch -R build/tsan/selftest

clean:
	rm -rf $(VENV) build dist
