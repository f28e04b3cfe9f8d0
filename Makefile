# Every target starts from nothing: it makes the virtual environment and installs what it needs, once.
PYTHON ?= python3
VENV ?= .venv
ORACLE ?=
BIN := $(VENV)/bin
# -qq and PYTHONWARNINGS: errors only; setuptools warns about every editable install.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check install -qq
# ORACLE=1 and ORACLE=0 decide; otherwise the oracle tests run on the oldest supported Python alone.
WANTS_ORACLE = $(BIN)/python -c 'import sys; sys.exit("$(ORACLE)" != "1" and ("$(ORACLE)" == "0" or sys.version_info[:2] != (3, 11)))'

.PHONY: demo test test-fast lint format bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed ## eight prompts through the engine
	@$(BIN)/python examples/demo.py

test: $(VENV)/.installed-dev $(VENV)/.installed-oracle$(ORACLE) ## every test
	@$(BIN)/pytest $(ARGS)

test-fast: $(VENV)/.installed-dev ## the tests that take little time and need no torch
	@$(BIN)/pytest -m "not slow and not oracle" $(ARGS)

lint: $(VENV)/.installed-dev ## what must hold before a commit
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/pyright

format: $(VENV)/.installed-dev ## formats the code and fixes what can be fixed safely
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

bench: $(VENV)/.installed ## tokens per second on the standard workload
	@$(BIN)/python benchmarks/offline_throughput.py $(ARGS)

clean: ## everything that can be made again, but not downloaded models
	rm -rf .venv .venv-newer .cache .hypothesis .pytest_cache .ruff_cache build dist *.egg-info
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
	@$(PIP) --editable .
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
