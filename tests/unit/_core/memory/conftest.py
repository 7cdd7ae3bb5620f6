"""A tmpfs or a disk of a few megabytes, mounted for one test; processes that are killed."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


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
def small_tmpfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Path]]:
    """Mounts a tmpfs of so many MiB, where arenas are made then; skips where mounting is not permitted."""
    mounted: list[Path] = []

    def mount(mebibytes: int) -> Path:
        path = tmp_path / f"tmpfs-{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=700", "tmpfs", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
        mounted.append(path)
        monkeypatch.setenv("FASTCKPT_SHM_DIR", str(path))
        return path

    yield mount
    for path in mounted:
        left = [file.name for file in path.iterdir()]
        _unmount(path)
        assert not left, f"left in shared memory: {left}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a disk of so many MiB; skips where that is not permitted."""
    mounted: list[Path] = []

    def mount(mebibytes: int) -> Path:
        path, image = tmp_path / f"disk-{len(mounted)}", tmp_path / f"disk-{len(mounted)}.img"
        path.mkdir()
        with image.open("wb") as file:
            file.truncate(mebibytes << 20)
        for command in (["mkfs.ext4", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(path)]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"cannot mount a disk: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        left = [file.name for file in path.iterdir() if file.name != "lost+found"]
        _unmount(path)
        assert not left, f"left on the disk: {left}"


def _unmount(path: Path) -> None:
    """Threads that mapped an image ahead of its save may need a moment to let go of it."""
    end = time.monotonic() + 20
    while (done := subprocess.run(["umount", str(path)], capture_output=True, text=True, check=False)).returncode:
        if time.monotonic() > end:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
            pytest.fail(done.stderr)
        time.sleep(0.05)
