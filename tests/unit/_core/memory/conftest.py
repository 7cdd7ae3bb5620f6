"""Arenas' paths; a tmpfs or a disk of a few megabytes, mounted for one test; processes that are killed."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastckpt._core.memory.arena import arena_path


def killed(act: Callable[[], object]) -> None:
    """Have a process do something, and be killed then."""
    if (child := os.fork()) == 0:
        try:
            act()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.fixture
def shm() -> Path:
    return Path(os.environ["FASTCKPT_SHM_DIR"])


@pytest.fixture
def path(shm: Path) -> Iterator[Path]:
    """The path of an arena, which is removed."""
    path = arena_path(str(shm), "/checkpoints", 0)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _mounts(folder: Path, commands: Callable[[Path, int], list[list[str]]]) -> Iterator[Callable[[int], Path]]:
    mounted: list[Path] = []

    def mount(mebibytes: int) -> Path:
        path = folder.with_name(f"{folder.name}-{len(mounted)}")
        path.mkdir()
        for command in commands(path, mebibytes):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"cannot mount: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        left = [file.name for file in path.iterdir() if file.name != "lost+found"]
        _unmount(path)
        assert not left, f"left in {path}: {left}"


@pytest.fixture
def small_tmpfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Path]]:
    """Mounts a tmpfs of so many MiB, where arenas are made then; skips where mounting is not permitted."""

    def commands(path: Path, mebibytes: int) -> list[list[str]]:
        monkeypatch.setenv("FASTCKPT_SHM_DIR", str(path))
        return [["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=700", "tmpfs", str(path)]]

    with _mounts(tmp_path / "tmpfs", commands) as mount:
        yield mount


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a disk of so many MiB; skips where that is not permitted."""

    def commands(path: Path, mebibytes: int) -> list[list[str]]:
        with (image := path.with_suffix(".img")).open("wb") as file:
            file.truncate(mebibytes << 20)
        return [["mkfs.ext4", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(path)]]

    with _mounts(tmp_path / "disk", commands) as mount:
        yield mount


def _unmount(path: Path) -> None:
    """Threads that mapped an image ahead of its save may need a moment to let go of it."""
    end = time.monotonic() + 20
    while (done := subprocess.run(["umount", str(path)], capture_output=True, text=True, check=False)).returncode:
        if time.monotonic() > end:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
            pytest.fail(done.stderr)
        time.sleep(0.05)
