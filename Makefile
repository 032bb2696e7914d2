PYTHON ?= python3

.PHONY: test clean
.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -e '.[dev]'
	touch $@

test: .venv/.installed
	.venv/bin/python -m pytest

clean:
	rm -rf .venv
