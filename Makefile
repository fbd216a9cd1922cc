# make train    a virtual environment, pinned dependencies, then a Llama that learns, in about two minutes
# make test     the same environment, then the linters and the tests that every change must pass
# make test-all            `make test`, then what takes longer: repetitions with inductor, wider covers, kills, two hosts
# make docs                the site of docs/, in build/site; a broken link or anchor fails it
# make campaign PART=...   hours: full products, many kills, faults in the code; without PART it lists the parts
#
# WORKERS     how many processes run tests side by side (default 2); all tests that start ranks share one of them
# PYTHON      the interpreter that makes the environment (default python3, 3.11 or newer, as constraints.txt)
# CPU_INDEX   where CPU builds of PyTorch are found; used on machines without an NVIDIA GPU. When it is out of reach, the
#             ordinary package index is used
PYTHON ?= python3
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := $(shell grep '^torch==' constraints.txt)
PIP := .venv/bin/python -m pip --disable-pip-version-check

# where an image sets it, each of some hundred starts of Python would compile titanlite and the tests again
unexport PYTHONDONTWRITEBYTECODE

# it makes .venv; run_train.sh would take it for the interpreter of the run, without the packages of .venv
unexport PYTHON

WORKERS ?= 2
PYTEST := .venv/bin/python -m pytest -q
TOGETHER := $(PYTEST) -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

.PHONY: train test test-all docs campaign lint install clean

train: .venv/installed
	./run_train.sh train_configs/llama_debug.toml

test: .venv/installed lint
	$(TOGETHER) -m 'not slow and not campaign' --minutes=build/minutes.txt

test-all: test docs
	$(TOGETHER) -m slow --minutes=build/minutes-slow.txt

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict

campaign: .venv/installed
	.venv/bin/python -m tests.campaigns $(PART)

lint: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports --no-logo
	.venv/bin/mypy

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo 'make needs Python 3.11 or newer: make PYTHON=python3.11; pip install . takes 3.10 too'; exit 1; }
	$(PYTHON) -m venv .venv
	@if command -v nvidia-smi >/dev/null 2>&1; then \
	    $(PIP) install -q -c constraints.txt '$(TORCH)'; \
	else \
	    $(PIP) install -q --retries 0 --timeout 15 --index-url '$(CPU_INDEX)' --no-deps '$(TORCH)' 2>/dev/null \
	        || echo 'no CPU build of PyTorch from $(CPU_INDEX); taking it from the ordinary index'; \
	    $(PIP) install -q -c constraints.txt '$(TORCH)'; \
	fi
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	touch $@

.venv/installed-docs: .venv/installed
	$(PIP) install -q -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
