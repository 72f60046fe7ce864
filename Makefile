# Two commands to know: `make serve` and `make test`. Everything they need goes into .venv.

MODEL ?= demo
HOST  ?= 127.0.0.1
PORT  ?= 8000
# More flags for `make serve`, as in ARGS="--max-model-len 4096".
ARGS  ?=

# The exact versions that the tests ran on (tools/constraints.py); empty for the newest that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt

# The first Python from 3.11 to 3.14, on a Mac for arm64. Some pinned packages have no build for newer versions.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import platform, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14) or \
	sys.platform == "darwin" and platform.machine() != "arm64")' 2>/dev/null && { command -v $$p; break; }; done)
BIN := .venv/bin
# Says how far it is on a terminal, and nothing elsewhere.
INSTALL := $(BIN)/python tools/install.py $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
# Test processes side by side, at most four; a file's tests stay together.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Where it is set, each of the hundreds of processes that tests start would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# Models that `make mac` measures.
MODELS ?= $(MODEL)

.PHONY: serve chat disagg gateway mac test test-full mutants lint format clang chromium clean

# Not $(BIN)/metal-engine: in folders that iCloud syncs, macOS hides files of .venv, and Python then ignores the link to
# the checkout.
serve: .venv/.installed  ## serve MODEL on HOST:PORT
	$(BIN)/python -m metal_engine serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

chat: .venv/.installed  ## talk to MODEL in the terminal
	$(BIN)/python -m metal_engine chat $(MODEL) $(ARGS)

disagg: .venv/.installed-dev  ## prefill on one server, decode on another, on this machine
	$(BIN)/python -m tools.disagg.demo $(MODEL)

gateway: .venv/.installed-dev  ## two servers, the KV store that they share and a gateway before them, on this machine
	$(BIN)/python -m tools.gateway.demo $(MODEL) $(ARGS)

mac: .venv/.installed $(if $(filter Linux,$(shell uname -s)),clang)  ## measure this machine for ten minutes a model; writes mac-report.md and mac-report.json
	$(BIN)/python -m tools.mac_report $(MODELS) $(ARGS)

test: .venv/.installed-dev clang chromium  ## all tests, long sweeps run small
	$(PYTEST) $(ARGS)

test-full: .venv/.installed-full clang chromium  ## all tests and the long sweeps
	$(PYTEST) -m "not mutants and not metal" $(ARGS)

mutants: .venv/.installed-dev clang  ## every mutant of the kernels; for whoever changes those, or their checks
	$(PYTEST) -m mutants $(ARGS)

# The last commit shared with origin/main; HEAD if there is none.
LINT_SINCE = $(shell git merge-base HEAD origin/main 2>/dev/null || echo HEAD)

lint: .venv/.installed-dev  ## ruff, mypy, import-linter, wording of changed lines, and constraints.txt against .venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.docs.prose --changed-since $(LINT_SINCE) --max-per-1000 80
	$(if $(CONSTRAINTS),$(BIN)/python -m tools.constraints --check)

format: .venv/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clang:  ## what the Metal simulator compiles with, installed where apt is at hand
	@sh tools/metal_sim/install_clang.sh

chromium:  ## what tests of the page run in, installed where apt is at hand
	@sh tools/fixtures/install_chromium.sh

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "metal-engine needs Python 3.11 to 3.14, on a Mac for arm64: install one, or make PYTHON=/path/to/python3"; exit 1; }
	@echo "Making .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv

.venv/.installed: .venv/bin/python pyproject.toml $(CONSTRAINTS)
	@echo "Installing metal-engine and what it needs into .venv: once, some minutes"
	@$(BIN)/python tools/install.py --upgrade pip
	@$(INSTALL) -e .
	@touch $@

.venv/.installed-dev: .venv/.installed
	@echo "Installing what the tests need into .venv"
	@$(INSTALL) -e '.[dev]'
	@$(INSTALL) --no-deps 'mlx-vlm>=0.7.10,<0.8'
	@touch $@

.venv/.installed-full: .venv/.installed-dev
	@echo "Installing what the long tests need into .venv"
	@$(INSTALL) -e '.[full]'
	@touch $@
