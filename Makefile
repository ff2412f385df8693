# Two commands do everything: `make train` and `make test`. `make help` lists the others.

VENV ?= .venv
# PyTorch is installed first: TORCH="torch==2.12.0" takes this version, nothing that of the engine (scripts/install.sh).
TORCH ?=
# Overrides for `make train`: make train ARGS="experiment=text_to_sql seed=1"
ARGS ?=
# The tests of `make test`: without those that take minutes and those that CI runs. TESTS="not rare" has the latter.
TESTS ?= not rare and not ci
# How many tests run at once: one more than a small machine has cores, since many tests wait for other processes.
JOBS ?= 3

PY := $(VENV)/bin/python
# One thread each: on small models the barriers between threads cost more than they save, and tests run side by side.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadgroup --durations=40
# What a run prints last are commands for this environment, which the reader's shell may not have.
HOW = [ -n "$$VIRTUAL_ENV" ] || printf '\nfor the commands above, in your shell: . %s/bin/activate\n' $(VENV)
export VENV TORCH

.DEFAULT_GOAL := help
.PHONY: help install train test test-fast test-engines test-lower-bounds lint types format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.base ## make .venv and install mtrl into it

train: $(VENV)/.base ## install, then train an agent; ARGS="key=value …" changes the run
	@trap : INT; $(PY) -m mtrl.main $(ARGS); status=$$?; $(HOW); exit $$status

test: $(VENV)/.dev ## install, then run the tests; TESTS="not rare" also runs those that only CI runs by itself
	$(PYTEST) -m "$(TESTS)"

test-fast: $(VENV)/.dev ## only the tests that take seconds
	$(PYTEST) -m "not slow and not ci"

test-engines: $(VENV)/.dev ## install vLLM and SGLang (.venv-vllm, .venv-sglang), then run every test that needs them
	$(PY) scripts/install_engine.py vllm
	$(PY) scripts/install_engine.py sglang
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/engines/real tests/test_benchmark_engines.py tests/test_docs.py

test-lower-bounds: ## the fast tests of ranks, models and updates with the oldest PyTorch and Transformers, in the cache
	scripts/test_lower_bounds.sh

lint: $(VENV)/.dev ## ruff: mistakes and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(VENV)/.dev ## mypy on the public API
	$(PY) -m mypy

format: $(VENV)/.dev ## let ruff mend and format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## remove .venv, caches and build outputs; runs in outputs/ stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps say what is installed: a second `make` goes straight to work.
$(VENV)/.base: setup.py scripts/install.sh
	scripts/install.sh
	@touch $@

$(VENV)/.dev: setup.py scripts/install.sh requirements/dev.bare
	scripts/install.sh dev
	@touch $(VENV)/.base $@
