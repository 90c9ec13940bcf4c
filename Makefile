# make demo [DATA=folder]   make test   make check   make site   make clean; make format, lint, ...

VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TORCH  := 2.13.0
# one more than two cores: a third of the tests waits for processes and the disk
WORKERS ?= 3

# some containers set it: each of hundreds of processes would compile every module that it imports
unexport PYTHONDONTWRITEBYTECODE

# kernels once more with every index checked, and as plain Python
CHECKS := format lint types test bounds nojit

.PHONY: demo check clean site $(CHECKS)
.DEFAULT_GOAL := test

# torch first: with it installed nothing below asks for another build, so that a machine without a
# GPU never pulls CUDA packages
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip setuptools wheel
	if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then \
	    $(BIN)/pip install -q --no-compile "torch>=$(TORCH)"; \
	else \
	    $(BIN)/python -c "import torch" 2>/dev/null \
	    || $(BIN)/pip install -q --no-compile "torch==$(TORCH)+cpu" 2>/dev/null \
	    || $(BIN)/pip install -q --no-compile "torch==$(TORCH)" --index-url https://download.pytorch.org/whl/cpu; \
	fi
	$(BIN)/pip install -q --no-compile -e ".[torch,pyg,dev,docs]"
	touch $@

demo: $(READY)
	$(BIN)/python -m tools.demo $(DATA)

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

check: $(READY)
	$(MAKE) --keep-going $(CHECKS)

format: $(READY)
	$(BIN)/ruff format --check .

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

bounds: $(READY)
	NUMBA_BOUNDSCHECK=1 $(BIN)/python -m pytest tests/blockstore/kernels

nojit: $(READY)
	NUMBA_DISABLE_JIT=1 $(BIN)/python -m pytest tests/blockstore/kernels

# every page, in build/site/html; links to nowhere and other warnings are errors
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m tools.site

clean:
	rm -rf $(VENV) build *.egg-info
