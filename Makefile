# Everything a newcomer runs: `make demo` and `make test`. Each creates .venv first if it is missing.

PYTHON ?= python3
BIN := .venv/bin
# Files of tests in two processes: compiling is what takes time, and a file's tests share compiled programs.
TWO := -n 2 --dist loadfile
# tests/many_devices has eight virtual devices, so processes of its own.

.PHONY: help .venv demo test test-all peer lint clean

help:
	@echo "make demo      continue three prompts with the shipped model, plain and speculative"
	@echo "make test      the tests (minutes)"
	@echo "make test-all  slow tests too"
	@echo "make peer      tests against torch and transformers (installs them)"
	@echo "make lint      ruff and pyright"
	@echo "make clean     remove .venv and caches"

.venv: .venv/ready

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed, and $(PYTHON) is older: make PYTHON=python3.12 ..." >&2; exit 2; }
	@echo "installing into .venv: jax and a dozen packages, a minute or so, once"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[test]'
	@touch $@

demo: .venv
	$(BIN)/python scripts/compare_decoding.py --show-text

test: .venv
	$(BIN)/python -m pytest $(TWO) -m "not slow and not peer"
	$(BIN)/python -m pytest $(TWO) -m "not slow" tests/many_devices

test-all: .venv
	$(BIN)/python -m pytest $(TWO) -m "not peer"
	$(BIN)/python -m pytest $(TWO) tests/many_devices

peer: .venv
	$(BIN)/pip install --quiet --editable '.[test,peer]'
	$(BIN)/python -m pytest -m peer

lint: .venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf .venv .pytest_cache .ruff_cache build *.egg-info
