# One entrance for people and for CI. `make` alone lists the targets.
# ARGS goes to the program behind a target: make up ARGS="--pods 2", make test ARGS="-k drain".

.DEFAULT_GOAL := help
.PHONY: help setup setup-test up check test compile bench-peers gpu lock format clean
SHELL := /bin/bash

BIN := .venv/bin
ARGS ?=
PYTHON ?= python3

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: ## make .venv with the locked packages, or do nothing if it is up to date
	@scripts/setup.sh

setup-test: ## the same with the test tools
	@scripts/setup.sh --test

up: ## gateway and pods on this machine; Ctrl-C drains and ends them (ARGS: options of `hotspare up`)
# On a terminal it gets a process group of its own (set -m): Ctrl-C then reaches it once and not make, which would
# otherwise end with an error although the drain went well.
	@scripts/setup.sh && if [ -t 0 ]; then set -m; $(BIN)/hotspare up $(ARGS); else exec $(BIN)/hotspare up $(ARGS); fi

check: setup-test ## lint, types, layers and unit tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest tests/unit --quiet

test: check ## everything that CI runs: check, then all other tests (ARGS: options of pytest)
# Those of the gateway mostly wait, so four at a time. With ARGS one of the two may select nothing, which is exit code 5.
	$(BIN)/pytest tests/integration --numprocesses 4 --quiet $(ARGS) $(if $(ARGS),|| [ $$? = 5 ])
	$(BIN)/pytest tests --ignore=tests/unit --ignore=tests/integration --numprocesses 2 --no-loadscope-reorder \
		--durations=15 $(ARGS) $(if $(ARGS),|| [ $$? = 5 ])

compile: setup-test ## compile the gateway's hot path (needs a C compiler); it is used from then on, until the sources change or make clean
	$(BIN)/python scripts/compile.py

bench-peers: ## install what `hotspare bench gateway --peers …` compares with: two routers into .peers/, and nginx
	@scripts/bench_peers.sh

gpu: ## on a machine with a GPU: facts, failures and timings of the CUDA path, within 8 minutes (PYTHON=python3)
# Such a machine may have no network: what is needed is Python 3.11 or later with pytest, msgspec and cuda-bindings, and
# torch for a part of it. ARGS=--fake-driver runs it without a GPU.
	@$(PYTHON) -c 'import pytest, msgspec, cuda.bindings' 2>/dev/null || { \
		echo "make gpu: $(PYTHON) lacks pytest, msgspec or cuda-bindings; install them, or: make setup-test && make gpu PYTHON=.venv/bin/python" >&2; exit 2; }
	$(PYTHON) -m pytest -c tests/gpu/pytest.ini tests/gpu $(ARGS)

lock: setup-test ## re-create requirements/*.txt (ARGS=--upgrade: with the newest versions)
	$(BIN)/python scripts/lock.py $(ARGS)

format: setup-test ## format the code and fix what lint can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what the tools wrote; .venv and downloaded models stay
	rm -rf build dist htmlcov .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find app workers gms tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
