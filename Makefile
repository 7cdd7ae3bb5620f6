# Everything runs in .venv, which any target makes by itself from Python 3.11 alone.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FRAMEWORKS := $(VENV)/.frameworks

.DEFAULT_GOAL := help
.PHONY: help environment demo demo-fsdp demo-deepspeed test lint types check faults bench format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[examples]'
	@touch $@

# DeepSpeed's setup imports torch, so it cannot be built in an environment of its own.
$(FRAMEWORKS): $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev,examples]'
	@touch $@

demo: $(READY)  ## train GPT-2 with two workers, kill one, resume from memory, draw the loss
	$(BIN)/python -m examples.gpt2.demo examples/ddp_gpt2/train.py

demo-fsdp: $(READY)  ## the same with FSDP
	$(BIN)/python -m examples.gpt2.demo examples/fsdp_gpt2/train.py --out runs/demo-fsdp

demo-deepspeed: $(FRAMEWORKS)  ## the same with DeepSpeed
	DS_ACCELERATOR=cpu $(BIN)/python -m examples.gpt2.demo examples/deepspeed_gpt2/train.py --out runs/demo-deepspeed

test: $(FRAMEWORKS)  ## run the tests
	$(BIN)/python -m pytest -q -n 3 --dist worksteal

lint: $(FRAMEWORKS)  ## check format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(FRAMEWORKS)  ## check types
	$(BIN)/mypy

environment: $(FRAMEWORKS)  ## only make .venv, with all that tests need

check: lint types test  ## lint, types and tests

faults: $(FRAMEWORKS)  ## the long fault campaigns: hundreds of random kills
	$(BIN)/python -m pytest -q -m campaign --timeout 3600

bench: $(READY)  ## measure saves, resumes and persists (writes nothing; see docs/benchmarks.md)
	$(BIN)/python benchmarks/memory_save.py

format: $(FRAMEWORKS)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what these targets made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info build dist runs
