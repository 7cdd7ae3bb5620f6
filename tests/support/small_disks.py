"""File systems that a test mounts for itself, and fills."""

import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest


def mounted(path: Path, *arguments: object) -> Path:
    """Mount a file system at a new path, by arguments of mount; skips the test where that is not permitted."""
    path.mkdir()
    command = ["mount", *map(str, arguments), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    return path


def unmount(path: Path) -> None:
    """Threads that mapped a file of it ahead of its use may need a moment to let go of it."""
    end = time.monotonic() + 20
    while (done := subprocess.run(["umount", str(path)], capture_output=True, text=True, check=False)).returncode:
        if time.monotonic() > end:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
            pytest.fail(done.stderr)
        time.sleep(0.05)


def leave(path: Path, free: int) -> Path:
    """Fill a file system up to so many bytes."""
    ballast = path / f"ballast-{time.monotonic_ns()}"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
        while file.write(bytes(1 << 12)):
            pass
    os.truncate(ballast, max(0, ballast.stat().st_size - free))
    return ballast
