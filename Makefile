# Loopline's tasks. `make` alone lists them.

PYTHON ?= python3
LOOPLINE_DATA_DIR ?= $(CURDIR)/.loopline
export LOOPLINE_DATA_DIR
# Without compiled modules every start of an engine or trainer takes half a minute longer.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# Extra words for pytest: make test ARGS="tests/store -k sqlite"
ARGS ?=

# make bench-trainer QUICK=1: the short version
QUICK ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test bench-trainer curves check lint format typecheck lock hooks clean distclean

help: ## Show this table
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv from the pinned lock and prepare the base model (resumable)
	@$(PYTHON) tools/setup.py

demo: setup ## Train a live session on arithmetic, watch it learn, chat with it (10 minutes)
	@$(BIN)/python tools/demo.py

test: setup ## Run the whole test suite
	@$(BIN)/python tools/system_packages.py
	@$(BIN)/python -m pytest $(ARGS)

bench-trainer: setup ## Compare the trainer with a bare PEFT loop (25 minutes; QUICK=1: about 5)
	@$(BIN)/python -m tests.bench.trainer $(if $(QUICK),--quick)

curves: setup ## Compare learning curves with a plain transformers + PEFT loop (SFT and GRPO, about 40 minutes)
	@$(BIN)/python -m tests.curves

check: lint typecheck test ## Everything a commit must pass: lint, types, tests

lint: setup ## ruff and the import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache

format: setup ## Format the code and fix what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

typecheck: setup ## Strict types in gateway, trainer and billing
	@$(BIN)/basedpyright
	@cd clients/python && $(CURDIR)/$(BIN)/basedpyright

lock: ## Resolve the pinned lock anew from pyproject.toml and requirements/
	@$(PYTHON) tools/lock.py

hooks: setup ## Let git check every commit (pre-commit)
	@$(BIN)/pre-commit install

clean: ## Remove caches and build output
	@rm -rf .cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info clients/python/build clients/python/src/*.egg-info
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## Also remove .venv and the data directory with its models, sessions and ledger
	@rm -rf .venv "$(LOOPLINE_DATA_DIR)"
