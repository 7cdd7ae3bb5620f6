# Everything runs in .venv, which any target makes by itself from Python 3.11 alone.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FRAMEWORKS := $(VENV)/.frameworks

# Releases of torch besides that of constraints.txt, and of Python; and the tests that rest on most of torch.
VERSIONS := 2.10.0 2.12.1 2.14.1 2.15.0 2.13.0-python3.13
VERSION_TESTS := tests/unit/_core/test_torch_version.py tests/e2e/ddp/test_save.py tests/e2e/ddp/test_load.py tests/e2e/ddp/test_overlap.py \
	tests/e2e/dcp tests/e2e/fsdp tests/e2e/launcher/test_behaviours.py tests/e2e/launcher/test_parity.py \
	tests/e2e/launcher/test_rendezvous.py tests/e2e/launcher/test_hang_watch.py tests/faults/test_hangs.py \
	tests/faults/test_kills.py tests/faults/test_table.py

# What is installed with `pip install fastckpt-run[EXTRA]`; its tests are in the folder of its name, or those named here.
EXTRAS := accelerate deepspeed huggingface lightning s3 watch
EXTRA_NEEDS_accelerate := torchdata
EXTRA_TESTS_s3 := tests/unit/_core/storage/remote/test_remote_store.py
EXTRA_NEEDS_s3 := moto[server]
EXTRA_TESTS_watch := tests/e2e/watch tests/unit/fastckpt_run/watch

.DEFAULT_GOAL := help
.PHONY: help environment demo demo-fsdp demo-deepspeed test lint types check docs docs-reference faults versions extras bench bench-quick peers format fuzz-data fuzz-meshes fuzz-state stores clean

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
	$(BIN)/python -m tests.suite -n 4 --dist worksteal

lint: $(FRAMEWORKS)  ## check format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(FRAMEWORKS)  ## check types
	$(BIN)/mypy

docs: $(FRAMEWORKS)  ## build the site of the documentation in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-reference: $(FRAMEWORKS)  ## write the generated pages: docs/errors.md, reference/{api,commands,options}.md
	$(BIN)/python -m docs_site

environment: $(FRAMEWORKS)  ## only make .venv, with all that tests need

check: lint types test  ## lint, types and tests

faults: $(FRAMEWORKS)  ## the long fault campaigns: hundreds of random kills, and properties with examples drawn anew
	$(BIN)/python -m pytest -q -m campaign --timeout 3600
	TEST_EXAMPLES=random $(BIN)/python -m pytest -q -n 4 --dist worksteal $$(grep -rl "from hypothesis" tests --include=test_*.py)

fuzz-data: $(FRAMEWORKS)  ## JOBS (default 300) jobs of random data, workers and kills: each sample once
	FASTCKPT_FUZZ_DATA=$(or $(JOBS),300) $(BIN)/python -m pytest -q -m campaign --timeout 3600 tests/fuzz/test_data.py

fuzz-meshes: $(FRAMEWORKS)  ## 200 random sharded models beside stock DCP
	$(BIN)/python -m pytest -q -s -m campaign --timeout 3600 tests/fuzz/test_meshes.py

fuzz-state: $(FRAMEWORKS)  ## 10,000 random states of ranks, equal or unlike in one entry
	$(BIN)/python -m pytest -q -m campaign --timeout 3600 tests/fuzz/test_states.py

# The packages of .venv, and those that these tests alone need.
stores: $(FRAMEWORKS)  ## the stores besides S3: servers of WebDAV, GCS and Azure, and the file systems of Arrow
	$(PYTHON) -m venv $(VENV)/stores
	$(BIN)/python -c 'import sys; print(*(p for p in sys.path if p.endswith("site-packages")), sep="\n")' \
		> $$($(VENV)/stores/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth
	$(VENV)/stores/bin/python -m pip install --quiet -c constraints.txt webdav4 wsgidav cheroot gcsfs \
		gcp-storage-emulator pyarrow adlfs
	if command -v npm; then npm install --silent --no-audit --no-fund --prefix $(VENV)/stores/azurite azurite; fi
	$(VENV)/stores/bin/python -m pytest -q -m stores tests/unit/_core/storage/test_protocols.py

versions: $(addprefix version-,$(VERSIONS))  ## the demo and the tests of torch's parts, with each of VERSIONS in turn

# RELEASE or RELEASE-PYTHON; takes 5 to 8 GB, which are removed if all passes.
version-%:
	$(or $(word 2,$(subst -, ,$*)),$(PYTHON)) -m venv $(VENV)/$@
	grep -vE '^(torch|setuptools)==' constraints.txt > $(VENV)/$@/constraints.txt
	$(VENV)/$@/bin/python -m pip install --quiet -c $(VENV)/$@/constraints.txt torch==$(firstword $(subst -, ,$*)) \
		-e '.[examples]' hypothesis pytest pytest-timeout pytest-xdist safetensors
	$(VENV)/$@/bin/python -m examples.gpt2.demo examples/ddp_gpt2/train.py --out runs/$@
	$(VENV)/$@/bin/python -m pytest -q -n 4 --dist worksteal $(VERSION_TESTS)
	rm -rf $(VENV)/$@

extras: $(addprefix extra-,$(EXTRAS))  ## the tests of each extra, in an environment that has this extra alone

# Takes 2 GB, which are removed if all passes.
extra-%:
	$(PYTHON) -m venv $(VENV)/$@
	$(VENV)/$@/bin/python -m pip install --quiet -c constraints.txt torch setuptools wheel
	$(VENV)/$@/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[$*]' \
		hypothesis pytest pytest-timeout pytest-xdist $(EXTRA_NEEDS_$*)
	$(VENV)/$@/bin/python -m pytest -q -n 2 --dist worksteal $(or $(EXTRA_TESTS_$*),tests/e2e/$*)
	rm -rf $(VENV)/$@

bench: $(READY)  ## all benchmarks beside limits and peers, or NAME alone (docs/evidence/results.md)
	$(BIN)/python -m benchmarks $(NAME)

# Their packages clash with each other; what they do not pin comes from .venv. FASTCKPT_PEERS names another place to the suite.
PEERS ?= $(or $(FASTCKPT_PEERS),$(VENV)/peers)
PEER_NEEDS_torchsnapshot := torchsnapshot==0.1.0
PEER_NEEDS_dlrover := dlrover[torch]==0.6.1 grpcio kubernetes tornado protobuf
PEER_NEEDS_nvrx := --no-deps nvidia-resiliency-ext==0.4.1 nvidia-ml-py defusedxml
PEER_NEEDS_orbax := orbax-checkpoint==0.12.8

peers: $(addprefix peer-,torchsnapshot dlrover nvrx orbax)  ## the peers that `make bench` compares with, each in an environment of its own

peer-%: $(READY)
	$(PYTHON) -m venv $(PEERS)/$*
	$(BIN)/python -c 'import sys; print(*(p for p in sys.path if p.endswith("site-packages")), sep="\n")' \
		> $$($(PEERS)/$*/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth
	$(PEERS)/$*/bin/python -m pip install --quiet -c constraints.txt $(PEER_NEEDS_$*)

bench-quick: $(READY)  ## all of them, small and once
	$(BIN)/python -m benchmarks --quick $(NAME)

format: $(FRAMEWORKS)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what these targets made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info build dist runs
