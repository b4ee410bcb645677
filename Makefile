# One entrance for people and for CI. `make` alone lists the targets.
# ARGS goes to the program behind a target: make up ARGS="--pods 2", make test ARGS="-k drain".

.DEFAULT_GOAL := help
.PHONY: help setup setup-test kube-tools up check test test-long load compile bench-peers gpu lock format test-pod images begin-pod-images clean
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

kube-tools: setup-test ## Helm, for the tests of the chart: .tools/bin
	@$(BIN)/python scripts/kube_tools.py

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

begin-pod-images: setup-test
# They take a minute or more from nothing, of which the checks need one core. Whoever needs them waits for them, and
# what still runs when this make has ended, however it ends, is ended, too.
	@scripts/pod_images.sh --begin $$PPID

test: begin-pod-images check kube-tools ## everything that CI runs: check, then all other tests (ARGS: options of pytest)
# Those of the gateway mostly wait, so four at a time. Of the others three: two with real vLLM engines (tests/conftest.py),
# which take a core each, and what else there is beside them, which mostly waits. With ARGS one of the two may select nothing, which is exit code 5.
	$(BIN)/pytest tests/integration --numprocesses 4 --quiet $(ARGS) $(if $(ARGS),|| [ $$? = 5 ])
	$(BIN)/pytest tests --ignore=tests/unit --ignore=tests/integration --numprocesses 3 --no-loadscope-reorder \
		--durations=15 $(ARGS) $(if $(ARGS),|| [ $$? = 5 ])

test-long: setup-test ## resumes on real engines, cut after every unit of every kind of answer, and killed; caches over fifty kills, fifty promotions in a row (ARGS: options of pytest)
	HOTSPARE_TEST_LONG=1 $(BIN)/pytest tests/engine/vllm/test_resume.py tests/engine/vllm/test_carry_over.py tests/engine/test_kills.py \
		tests/engine/vllm/test_self_test.py tests/process/workers/test_flat.py tests/process/workers/test_handover.py --quiet $(ARGS)

load: setup-test ## send load to a fleet started for it, and check every answer (ARGS: scenario and options of `hotspare bench load`)
	$(BIN)/hotspare bench load $(ARGS)

compile: setup-test ## compile the gateway's hot path (needs a C compiler); it is used from then on, until the sources change or make clean
	$(BIN)/python scripts/compile.py

bench-peers: ## install what `hotspare bench gateway|resume --peers …` compares with: two routers into .peers/, and nginx
	@scripts/bench_peers.sh

gpu: ## on a machine with a GPU: facts, failures and timings of the CUDA path, within 8 minutes (PYTHON=python3)
# Such a machine may have no network: what is needed is Python 3.11 or later with pytest, msgspec and cuda-bindings, and
# torch for a part of it; vLLM for CUDA and hotspare's packages for the engines (docs/gpu.md). ARGS=--fake-driver runs it
# without a GPU.
	@$(PYTHON) -c 'import pytest, msgspec, cuda.bindings' 2>/dev/null || { \
		echo "make gpu: $(PYTHON) lacks pytest, msgspec or cuda-bindings; install them, or: make setup-test && make gpu PYTHON=.venv/bin/python" >&2; exit 2; }
	$(PYTHON) -m pytest -c tests/gpu/pytest.ini tests/gpu $(ARGS)

images: setup ## build the images of gateway and worker with podman or docker (ARGS: options of scripts/images.py)
	$(BIN)/python scripts/images.py $(ARGS)

test-pod: setup-test kube-tools ## the chart's pods, run by podman, which is installed if it is missing (root; ARGS: options of pytest)
	@scripts/podman.sh || [ $$? = 3 ]
	$(BIN)/pytest tests/pod --durations=10 $(ARGS)

lock: setup-test ## re-create requirements/*.txt (ARGS=--upgrade: with the newest versions)
	$(BIN)/python scripts/lock.py $(ARGS)

format: setup-test ## format the code and fix what lint can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what the tools wrote; .venv and downloaded models stay
	@scripts/pod_images.sh --end
	scripts/podman.sh --remove
	rm -rf build dist htmlcov .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find app workers gms tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
