"""Jobs of the training with DeepSpeed, and runs that nothing befell to compare them with."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.faults.conftest import new_job  # noqa: F401 (a fixture)

PROGRAM = str(Path(__file__).with_name("train.py"))
OPTIONS = {
    "program": PROGRAM,
    "FASTCKPT_PRELOAD": "auto",
    "DS_ACCELERATOR": "cpu",
    "MALLOC_PERTURB_": "90",  # the same in each run: DeepSpeed pads partitions with what is in memory
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """Of this process alone. DeepSpeed keeps groups in variables of a module."""
    import deepspeed
    from deepspeed.utils import groups

    from tests.e2e.deepspeed import gloo  # noqa: F401 (for what it does)
    from tests.e2e.deepspeed.engines import config, engine_of, small

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        deepspeed.init_distributed("gloo", verbose=False)
        engine_of(small(), config(0))  # makes groups that stay
        yield
        for cached in (value for name, value in vars(groups).items() if name.isupper() and isinstance(value, dict)):
            cached.clear()
        groups._WORLD_GROUP = deepspeed.comm.comm.cdb = None
        dist.destroy_process_group()
        gc.collect()


def tool(*command: object, **environment: str) -> str:
    arguments, variables = [sys.executable, *map(str, command)], os.environ | environment
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, check=False, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
