# Loopline's tasks. `make` alone lists them.

PYTHON ?= python3
LOOPLINE_DATA_DIR ?= $(CURDIR)/.loopline
export LOOPLINE_DATA_DIR
# Without compiled modules every start of an engine or trainer takes half a minute longer.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# Extra words for pytest: make test ARGS="tests/store -k sqlite"
ARGS ?=
# The crash tests': how often, how many operations, what decides everything random, on which database and engine.
N ?=
OPS ?= 2000
SEED ?= 1
DB ?= sqlite
ENGINE ?= scripted
MODEL ?= tiny
CRASH = $(BIN)/python -m tests.crash

# The ledger's benches: calls, how many of them on vLLM (half), kills of the gateway, races for a budget.
CALLS ?= 1000
REAL ?=
KILLS ?= 10
RACES ?= 300

# make acks FAILING=1: while fsyncs fail
FAILING ?=

# make registry-acceptance ONLY=crowd: one part
ONLY ?=

# make bench-trainer QUICK=1: the short version
QUICK ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test bench-trainer bench-gateway bench-store bench-waiters bench-ledger bench-budgets bench-statements curves registry-acceptance crash chaos faults pauses saves acks fuzz leavers recovery sagemaker-acceptance tinker-acceptance check lint format typecheck proto lock hooks clean distclean

help: ## Show this table
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv from the pinned lock and prepare the base model (resumable)
	@$(PYTHON) tools/setup.py

demo: setup ## Train a live session on arithmetic, watch it learn, chat with it (10 minutes)
	@$(BIN)/python tools/demo.py

test: setup ## Run the whole test suite
	@$(BIN)/python tools/system_packages.py
	@$(BIN)/python -m pytest $(ARGS)

bench-trainer: setup ## Compare the trainer with a bare PEFT loop (25 minutes; QUICK=1: about 5)
	@$(BIN)/python -m tests.bench.trainer $(if $(QUICK),--quick)

bench-gateway: setup ## Compare an engine called directly and through the gateway, then the gateway alone (10 minutes): ALTERNATIONS=5
	@$(BIN)/python -m tests.bench.gateway --alternations $(or $(ALTERNATIONS),5)

bench-store: setup ## Measure group commit with slow fsyncs (needs strace)
	@$(BIN)/python -m tests.bench.store

bench-waiters: setup ## Submit while 2,000 clients wait for operations: WAITERS=2000 DB=sqlite|postgres
	@$(BIN)/python -m tests.bench.waiters --waiters $(or $(WAITERS),2000) --database $(DB)

bench-ledger: setup ## Find every token that an engine counted in the ledger: CALLS=1000 REAL=500 KILLS=10 SEED=1
	@$(BIN)/python -m tests.bench.ledger --calls $(CALLS) $(if $(REAL),--real $(REAL)) --kills $(KILLS) --seed $(SEED)

bench-budgets: setup ## Race for budgets through two gateways: RACES=300 SEED=1 DB=sqlite|postgres
	@$(BIN)/python -m tests.bench.budgets --races $(RACES) --database $(DB) --seed $(SEED)

bench-statements: setup ## Print the statement of a month of 100,000 usage facts
	@$(BIN)/python -m tests.bench.statements

curves: setup ## Compare learning curves with a plain transformers + PEFT loop (SFT and GRPO, about 40 minutes)
	@$(BIN)/python -m tests.curves

registry-acceptance: setup ## Adapters under load, round trips, 300 publications (20 minutes): ONLY=travels|bfloat16|prefixes|crowd|growth
	@$(BIN)/python -m tests.registry $(if $(ONLY),--only $(ONLY))

crash: setup ## Kill everything in turn, lose nothing: N=200 SEED=1 DB=sqlite|postgres ENGINE=scripted|vllm
	@$(CRASH) crash --rounds $(or $(N),20) --seed $(SEED) --database $(DB) --engine $(ENGINE)

chaos: setup ## Send through a proxy that duplicates, drops, delays and reorders: OPS=2000 SEED=1 DB=...
	@$(CRASH) chaos --operations $(OPS) --seed $(SEED) --database $(DB)

faults: setup ## SIGTERM, failing fsyncs and writes, a full disk, database restarts: N=20 SEED=1 DB=...
	@$(CRASH) faults --rounds $(or $(N),20) --seed $(SEED) --database $(DB)

pauses: setup ## Stop a computing trainer beyond its lease and wake it: N=100 SEED=1 DB=...
	@$(CRASH) pauses --rounds $(or $(N),100) --seed $(SEED) --database $(DB)

saves: setup ## Kill the trainer while it writes versions: N=100 SEED=1 DB=...
	@$(CRASH) saves --rounds $(or $(N),100) --seed $(SEED) --database $(DB)

acks: setup ## Show with strace that acknowledgements follow the fsync of what they need: N=200 FAILING=1 DB=...
	@$(CRASH) acks --count $(or $(N),200) --seed $(SEED) --database $(DB) $(if $(FAILING),--failing)

fuzz: setup ## Send N spoiled requests and N made of schemas to every operation of every dialect: N=5000 SEED=1
	@$(BIN)/python -m tests.fuzz --count $(or $(N),5000) --seed $(SEED)

leavers: setup ## Let 500 clients leave their streams and 500 their calls; count tasks, files and holds after: N=500
	@LOOPLINE_LEAVERS=$(or $(N),500) $(BIN)/python -m pytest tests/wire/test_openai_baseline.py

recovery: setup ## Measure how long a long session takes to come back: MODEL=tiny|smollm2 DB=...
	@$(CRASH) recovery --model $(MODEL) --database $(DB)

sagemaker-acceptance: setup ## Drive Amazon's unmodified SDK against real parts: the client tour and a GRPO loop (30 minutes)
	@$(BIN)/python -m pytest tests/acceptance/test_sagemaker.py tests/acceptance/sagemaker_grpo.py -s

tinker-acceptance: setup ## Let tinker-cookbook's recipes learn through Loopline (ONLY=supervised,arithmetic,...)
	@$(BIN)/python -m tests.tinker_acceptance $(if $(ONLY),--only $(ONLY))

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

proto: ## Write the Tinker dialect's protobuf module anew (needs protoc 3.21)
	@protoc --python_out=. --pyi_out=. gateway/wire/tinker/wire.proto

lock: ## Resolve the pinned lock anew from pyproject.toml and requirements/
	@$(PYTHON) tools/lock.py

hooks: setup ## Let git check every commit (pre-commit)
	@$(BIN)/pre-commit install

clean: ## Remove caches and build output
	@rm -rf .cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info clients/python/build clients/python/src/*.egg-info
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## Also remove .venv and the data directory with its models, sessions and ledger
	@rm -rf .venv "$(LOOPLINE_DATA_DIR)"
