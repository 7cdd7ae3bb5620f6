"""The command in this process, and small checkpoints for it to look at."""

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fastckpt import DdpCheckpointer, StorageType
from fastckpt._core.format.ids import SaveId
from fastckpt._core.snapshot.rng_state import rng_state
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt_run.cli import main


@dataclass
class Said:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on standard output."""
        assert self.code in (0, 1), self.err
        return json.loads(self.out)


Fastckpt = Callable[..., Said]


@pytest.fixture
def fastckpt() -> Fastckpt:
    def run(*arguments: Any, **options: Any) -> Said:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments], **options)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Said(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def directory(tmp_path) -> Path:
    return tmp_path / "run"


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((4, 3), float(value)), "b": torch.zeros(3)}, "step": int(value), "lr": 0.5}


def publish(directory: Path, step: int, history: int = 1, **options: Any) -> None:
    """A checkpoint as a job of one rank would have persisted it."""
    own = {"rng": rng_state(), "state": {"epoch": step}}
    files = {"model.pt": options.pop("state", None) or state(step), "rank_0.pt": own}
    images = directory.parent / f"images-{history}-{step}"
    images.mkdir(exist_ok=True)
    for name, content in files.items():
        torch.save(content, images / name)
    paths = {name: images / name for name in files}
    CheckpointDirectory(directory).publish(PublishRequest(SaveId(history, step), paths, **options))


def quarantine(directory: Path, step: int, why: str = "bits flipped") -> None:
    store = CheckpointDirectory(directory)
    store.quarantine(next(stored for stored in store.checkpoints() if stored.id.step == step), why)


def killed_job(directory: Path, then: Callable[[], object] = lambda: None) -> None:
    """A job that has saved step 1 to storage and step 2 to memory, and was killed."""

    def work() -> None:
        checkpointer = DdpCheckpointer(directory)
        checkpointer.save_checkpoint(1, {"w": torch.ones(2)}, storage_type=StorageType.DISK)
        checkpointer.wait_latest_checkpoint(60)
        checkpointer.save_checkpoint(2, {"w": torch.ones(2)}, storage_type=StorageType.MEMORY)
        then()
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture(scope="session")
def recorded_steps(tmp_path_factory) -> Path:
    """Published once, for tests to copy."""
    directory = tmp_path_factory.mktemp("recorded") / "run"
    for step in (10, 20, 30):
        publish(directory, step)
    return directory


@pytest.fixture
def three(recorded_steps, directory) -> Path:
    """Steps 10, 20 and 30 on storage."""
    return shutil.copytree(recorded_steps, directory)
