# Everything here needs Python >= 3.11 and make, nothing else.

PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv
LOCK_FLAGS ?=
JOBS ?= 2

# Bytecode of everything that is imported, for the hundreds of processes that the tests start. Kept out of the source
# tree, and also where the environment says not to write any.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/bytecode

.DEFAULT_GOAL := help
.PHONY: help env run example check test lint types format requirements bench structure adopt soak lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: .venv/.stamp ## make .venv with every pinned tool in it

run: env ## serve example graphs on a model that needs no key
	$(BIN)/penstock serve --db sqlite:///penstock.db

example: env ## run an example graph here: parallel branches, a retry, a fallback, a budget that trips
	$(BIN)/penstock run examples/research.py:graph --input '"dams"' --max-cost 0.50

check: lint types ## run the quick checks: style, types, import layers, unit tests
	$(BIN)/pytest --unit --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder

test: lint types ## run every check: style, types, import layers, all tests
	$(BIN)/pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder

lint: env ## check style, formatting and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: env ## check types
	$(BIN)/mypy

format: env ## format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

requirements: env ## count what is done and what is deferred
	$(BIN)/python -m tests.requirements

bench: env ## run every benchmark
	$(BIN)/python -m benchmarks

structure: env ## count modules, import cycles, and what one chat request costs
	$(BIN)/python -m tools.structure

adopt: env ## drive other frameworks against a fake provider, and write what was measured into docs/frameworks.md
	$(BIN)/python -m tools.adopt

soak: env ## run the reliability tests in their long form
	PENSTOCK_SOAK=1 $(BIN)/pytest -m reliability --timeout=3600

lock: | $(UV) ## pin the dependencies anew (LOCK_FLAGS=--upgrade for the newest)
	$(UV) pip compile pyproject.toml --extra all --group dev --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-annotate --no-header --no-config $(LOCK_FLAGS) --quiet --output-file requirements.lock

clean: ## remove the environment and everything generated
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks examples tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# uv itself is pinned in the lock; pip installs that one entry, hashes included.
$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	awk '/^uv==/ { on = 1 } on { print } on && !/\\$$/ { exit }' requirements.lock > .venv/uv.txt
	$(BIN)/python -m pip install --quiet --require-hashes -r .venv/uv.txt

# pip stands in where uv cannot reach the package index, e.g. when only pip is configured for a mirror.
.venv/.stamp: pyproject.toml requirements.lock | $(UV)
	$(UV) pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock \
		|| $(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e . \
		|| $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@
