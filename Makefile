PYTHON ?= python3
BIN := .venv/bin

.PHONY: help test lint format coverage hammer bench demo clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -e '.[redis,cli,dev]'
	touch $@

test: .venv/.installed  ## all tests; ARGS="-k name" for some of them
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

lint: .venv/.installed  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed  ## ruff's formatter, and what its rules can mend by themselves
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: .venv/.installed  ## all tests, with the coverage of branches and its gate
	$(BIN)/python -m pytest --cov --cov-report=term $(ARGS)

hammer: .venv/.installed  ## the registry stores under many processes and threads
	$(BIN)/python -m pytest tests/contract/test_hammer.py $(ARGS)

bench: .venv/.installed  ## every benchmark; prints tables
	@set -e; for bench in tests/benchmarks/bench_*.py; do \
		echo "== $$bench"; PYTHONPATH=tests $(BIN)/python $$bench; \
	done

demo: .venv/.installed  ## a fleet on embedded parts, with the plugin and without
	$(BIN)/python -m celery_capacity demo

clean:  ## what the other targets made
	rm -rf .venv .coverage .coverage.* htmlcov build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
