# One command for each thing a developer does. `make` alone prints them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
T ?= tests
# Much of a test is waiting: more of them run at once than there are cores.
JOBS ?= 4

.DEFAULT_GOAL := help
.PHONY: help install run test faults lint fmt bench migrate

help: ## print these targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed ## make .venv and install everything, pinned, into it

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

run: install ## run a broker on http://127.0.0.1:6632, with a PostgreSQL of its own
	$(BIN)/queen-pg serve

test: install ## run the tests, JOBS=4 at a time; T=tests/sql narrows
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(T)

faults: install ## run the whole fault campaign (hours; ARGS="--rounds 1" shortens it)
	$(BIN)/python -m tests.faults $(ARGS)

lint: install ## check style, types and layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/tidy

fmt: install ## repair what can be repaired
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: install ## measure it beside plain SQL and other queues; A=--full for hours of it
	$(BIN)/python -m bench $(A)

migrate: install ## bring the database up to date
	$(BIN)/queen-pg migrate
