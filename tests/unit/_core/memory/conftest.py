"""Arenas' paths; a tmpfs or a disk of a few megabytes, mounted for one test; processes that are killed."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastckpt._core.memory.arena import arena_path
from tests.support.small_disks import mounted, unmount


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
def _mounts(folder: Path, arguments: Callable[[Path, int], list[str]]) -> Iterator[Callable[[int], Path]]:
    made: list[Path] = []

    def mount(mebibytes: int) -> Path:
        path = folder.with_name(f"{folder.name}-{len(made)}")
        made.append(mounted(path, *arguments(path, mebibytes)))
        return path

    yield mount
    for path in made:
        left = [file.name for file in path.iterdir() if file.name != "lost+found"]
        unmount(path)
        assert not left, f"left in {path}: {left}"


@pytest.fixture
def small_tmpfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Path]]:
    """Mounts a tmpfs of so many MiB, where arenas are made then; skips where mounting is not permitted."""

    def arguments(path: Path, mebibytes: int) -> list[str]:
        monkeypatch.setenv("FASTCKPT_SHM_DIR", str(path))
        return ["-t", "tmpfs", "-o", f"size={mebibytes}m,mode=700", "tmpfs"]

    with _mounts(tmp_path / "tmpfs", arguments) as mount:
        yield mount


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a disk of so many MiB; skips where that is not permitted."""

    def arguments(path: Path, mebibytes: int) -> list[str]:
        (image := path.with_suffix(".img")).touch()
        os.truncate(image, mebibytes << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        return ["-o", "loop", str(image)]

    with _mounts(tmp_path / "disk", arguments) as mount:
        yield mount
