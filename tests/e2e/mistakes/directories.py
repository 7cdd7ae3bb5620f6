"""Mistakes with the checkpoint directory and its contents."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from fsspec.registry import _registry

from fastckpt.ddp import DdpCheckpointer, StorageType
from fastckpt.errors import ConfigError, FastckptError, NoLoadableCheckpoint
from tests.e2e.mistakes.table import WARNING, WORKS, Scene, answered, save, train


@answered(ConfigError, value="checkpoint_dir is ''", limit="a directory", remedy="such as 'checkpoints'")
def directory_empty(scene: Scene) -> None:
    scene.environment.chdir(Path(scene.directory).parent)
    train("")


@answered(ConfigError, value="checkpoint_dir is None", limit="a directory", remedy="such as 'checkpoints'")
def directory_none(scene: Scene) -> None:
    train(None)


@answered(ConfigError, value="checkpoints is a file", limit="a directory", remedy="give")
def directory_is_a_file(scene: Scene) -> None:
    Path(scene.directory).write_text("x")
    save(scene.directory)


@answered(ConfigError, value="checkpoint of step 1 itself", limit="directory that it is in", remedy="resume(step=1)")
def directory_is_a_checkpoint(scene: Scene) -> None:
    train(scene.directory, steps=1)
    try:
        save(f"{scene.directory}/checkpoint-1")
    finally:
        assert not Path(scene.directory, "checkpoint-1/.fastckpt").exists(), "nothing is put into it"


@answered(WORKS)
def directory_in_the_home_directory(scene: Scene) -> None:
    home = Path(scene.directory).parent
    scene.environment.setenv("HOME", str(home))
    scene.environment.chdir(home)
    save("~/checkpoints")
    assert Path(scene.directory).is_dir() and not Path("~").exists()
    Path("~/checkpoints").mkdir(parents=True)
    save("~/checkpoints")
    assert any(Path("~/checkpoints").iterdir()), "what an earlier version has made"


@answered(ConfigError, value="/proc/nope/checkpoints", limit="No such file or directory", remedy="give")
def directory_that_cannot_be_made(scene: Scene) -> None:
    save("/proc/nope/checkpoints")


@answered(WARNING, value="Read-only file system", limit="cannot be written to", remedy="choose another directory")
def directory_read_only(scene: Scene) -> None:
    """Training goes on: it may be mounted for writing again, and memory holds what was saved."""
    shared_memory = os.environ["FASTCKPT_SHM_DIR"]
    mounted = scene.mount(4)
    scene.environment.setenv("FASTCKPT_SHM_DIR", shared_memory)
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    DdpCheckpointer(mounted).close()


@answered(ConfigError, value="s3://bucket/run", limit="s3fs", remedy="pip install")
def directory_whose_package_is_not_there(scene: Scene) -> None:
    hidden = Path(scene.directory).with_name("hidden")
    hidden.mkdir()
    (hidden / "s3fs.py").write_text("raise ImportError('no s3fs here')")
    scene.environment.syspath_prepend(hidden)
    scene.environment.delitem(sys.modules, "s3fs", raising=False)
    scene.environment.delitem(_registry, "s3", raising=False)  # a test before may have needed it
    save("s3://bucket/run")


@answered(ConfigError, value="s4://bucket/run", limit="s4", remedy="such as s3://bucket/run1")
def directory_of_an_unknown_protocol(scene: Scene) -> None:
    save("s4://bucket/run")


@answered(FastckptError, value="this directory", limit="one at a time", remedy="close that one first")
def directory_of_two_checkpointers(scene: Scene) -> None:
    with DdpCheckpointer(scene.directory):
        DdpCheckpointer(scene.directory)


@answered(NoLoadableCheckpoint, value="checkpoint-2", limit="manifest.json", remedy="Restore one of them")
def manifests_damaged(scene: Scene) -> None:
    def call(c: DdpCheckpointer, step: int, state: dict[str, Any]) -> object:
        return c.save_checkpoint(step, state, storage_type=StorageType.DISK)

    save(scene.directory, call)
    for manifest in Path(scene.directory).glob("checkpoint-*/manifest.json"):
        manifest.write_text("{")
    time.sleep(0.1)
    save(scene.directory, call)


@answered(NoLoadableCheckpoint, value="rank_0.pt", limit="holds no checkpoint of fastckpt", remedy="resume_path=")
def directory_of_flash_checkpoint(scene: Scene) -> None:
    step = Path(scene.directory, "100")
    step.mkdir(parents=True)
    torch.save({"model": {"w": torch.ones(3)}, "step": 100}, step / "rank_0.pt")
    Path(scene.directory, "dlrover_latest.txt").write_text("100")
    save(scene.directory)
