# Everything runs in .venv, which any target makes by itself from Python 3.11 alone.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test lint types check faults bench format clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,examples]'
	@touch $@

demo: $(READY)  ## train GPT-2 with two workers, kill one, resume from memory, draw the loss
	$(BIN)/python -m examples.ddp_gpt2.demo

test: $(READY)  ## run the tests
	$(BIN)/python -m pytest -q -n 3 --dist worksteal

lint: $(READY)  ## check format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)  ## check types
	$(BIN)/mypy

check: lint types test  ## lint, types and tests

faults: $(READY)  ## the long fault campaigns: hundreds of random kills
	$(BIN)/python -m pytest -q -m campaign --timeout 3600

bench: $(READY)  ## measure saves, resumes and persists (writes nothing; see docs/benchmarks.md)
	$(BIN)/python benchmarks/memory_save.py

format: $(READY)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what these targets made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info runs
