PYTHON ?= python3
BIN := .venv/bin

.PHONY: help test lint format coverage matrix hammer faults features soak bench demo clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -e '.[redis,cli,dev]'
	touch $@

# Four, also on two processors: most of the time a test waits for a worker.
test: .venv/.installed  ## all tests; ARGS="-k name" for some of them
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: .venv/.installed  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed  ## ruff's formatter, and what its rules can mend by themselves
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: .venv/.installed  ## all tests, with the coverage of branches and its gate
	$(BIN)/python -m pytest --cov --cov-report=term $(ARGS)

# Those of pyenv are found if it is told to use them all; any others are found on the PATH.
matrix: .venv/.installed  ## a choice of the tests on every supported Python and Celery; ARGS="-p 3.13" for some
	$(BIN)/python -m pip install --quiet -e '.[matrix]'
	PYENV_VERSION="$$(pyenv versions --bare 2>/dev/null | paste -sd: -)" $(BIN)/nox -r $(ARGS)

hammer: .venv/.installed  ## the registry stores under many processes and threads
	$(BIN)/python -m pytest tests/contract/test_hammer.py $(ARGS)

faults: .venv/.installed  ## the fault tests, with the long ones that make test leaves out
	$(BIN)/python -m pytest -n auto --maxprocesses 2 --dist loadfile -m "soak or not soak" \
		tests/faults tests/acceptance/test_lifecycle.py $(ARGS)

features: .venv/.installed  ## the tests of Celery's features, on every broker, with what make test leaves out
	$(BIN)/python -m pytest -n auto --maxprocesses 2 --dist loadfile -m "soak or not soak" tests/features $(ARGS)

MINUTES ?= 30
BROKER ?= redis
soak: .venv/.installed  ## random faults against a fleet: MINUTES=30 BROKER=redis|rabbitmq ARGS="--seed 1"
	PYTHONPATH=tests $(BIN)/python -m soak --minutes $(MINUTES) --broker $(BROKER) $(ARGS)

bench: .venv/.installed  ## every benchmark; prints tables
	@set -e; for bench in tests/benchmarks/bench_*.py; do \
		echo "== $$bench"; PYTHONPATH=tests $(BIN)/python $$bench; \
	done

demo: .venv/.installed  ## a fleet on embedded parts, with the plugin and without
	$(BIN)/python -m celery_capacity demo

clean:  ## what the other targets made
	rm -rf .venv .nox .coverage .coverage.* htmlcov build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
