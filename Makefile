# Every target starts from nothing: it makes the virtual environment and installs what it needs, once.
PYTHON ?= python3
VENV ?= .venv
ORACLE ?=
# For the demo on a GPU: EXTRAS=cuda13 or cuda12.
EXTRAS ?=
GATE_VENV ?= .venv-gate
GATE_JAX ?= 0.10.2
BIN := $(VENV)/bin
# 1: tests compile without LLVM's optimisations (tests/conftest.py), in less than half the time.
QUICK_TO_COMPILE ?=
# Most of the tests' time is compilation, which uses one core. Neighbours share programs: each process gets one piece of
# the tests, and part of another's once its own is done.
PARALLEL := -n auto --maxprocesses 4 --dist worksteal
PYTEST = QUICK_TO_COMPILE=$(QUICK_TO_COMPILE) $(BIN)/pytest
# -qq and PYTHONWARNINGS: errors only; setuptools warns about every editable install.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check install -qq
# ORACLE=1 and ORACLE=0 decide; otherwise the oracle tests run on the oldest supported Python alone.
WANTS_ORACLE = $(BIN)/python -c 'import sys; sys.exit("$(ORACLE)" != "1" and ("$(ORACLE)" == "0" or sys.version_info[:2] != (3, 11)))'

.PHONY: demo test test-fast lint format bench gpu-check gpu-gate clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed ## eight prompts through the engine
	@$(BIN)/python examples/demo.py

test: $(VENV)/.installed-dev $(VENV)/.installed-oracle$(ORACLE) ## every test
	@$(PYTEST) $(PARALLEL) $(ARGS)

test-fast: $(VENV)/.installed-dev ## the tests that take little time and need no torch
	@$(PYTEST) -m "not slow and not oracle" $(PARALLEL) $(ARGS)

lint: $(VENV)/.installed-dev ## what must hold before a commit
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/pyright

format: $(VENV)/.installed-dev ## formats the code and fixes what can be fixed safely
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

bench: $(VENV)/.installed ## tokens per second on the standard workload
	@$(BIN)/python benchmarks/offline_throughput.py $(ARGS)

gpu-check: DIR = benchmarks/out/gpu-check
gpu-check: ## on a machine with a GPU: its tests and benchmarks, with the machine's own packages; results in DIR
	@$(PYTHON) benchmarks/gpu_check.py --dir "$(DIR)" $(ARGS)

gpu-gate: $(GATE_VENV)/.installed-$(GATE_JAX) ## compiles every GPU program for A100, H100, H200, without a GPU; table in DIR
	@JAX_PLATFORMS=cpu $(GATE_VENV)/bin/python -m benchmarks.gpu_gate --output "$(or $(DIR),$(if $(ARGS),.cache,benchmarks/results)/gpu_gate)" $(ARGS)

clean: ## everything that can be made again, but not downloaded models
	rm -rf .venv .venv-newer .venv-gate .venv-gate-newer .cache .hypothesis .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else \
		"pagedjax needs Python 3.11 to 3.13; $(PYTHON) is %d.%d. Choose one with: make PYTHON=python3.12 ..." % v)'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "$(PYTHON) comes without venv. On Debian or Ubuntu: sudo apt install python3-venv"; exit 1; }
	@echo "Making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing pagedjax into $(VENV) (minutes the first time)"
	@$(PIP) --editable '.$(if $(EXTRAS),[$(EXTRAS)])'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "Installing pagedjax and the tools for development into $(VENV) (minutes the first time)"
	@$(PIP) --editable '.[dev,serve]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-oracle$(ORACLE): $(VENV)/.installed-dev
	@if $(WANTS_ORACLE); then \
		echo "Installing torch, the oracle of some tests, into $(VENV)"; $(PIP) --editable '.[oracle]'; \
	else \
		echo "Leaving torch out: the oracle tests skip (ORACLE=1 brings it in)"; \
	fi
	@touch $@

# Its own environment, as the CUDA plugin would slow every other program's start. No CUDA libraries: nothing runs.
$(GATE_VENV)/.installed-$(GATE_JAX):
	@$(MAKE) --no-print-directory VENV=$(GATE_VENV) $(GATE_VENV)/bin/python
	@echo "Installing jax $(GATE_JAX) with its CUDA compiler into $(GATE_VENV) (minutes the first time)"
	@$(PIP:$(BIN)/%=$(GATE_VENV)/bin/%) 'jax==$(GATE_JAX)' 'jax-cuda12-plugin==$(GATE_JAX)' nvidia-cuda-nvcc-cu12 \
		'flax>=0.12.8' 'jaxtyping>=0.3.11' 'numpy>=2.4' tqdm
	@touch $@
