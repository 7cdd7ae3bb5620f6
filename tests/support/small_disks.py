"""File systems that a test mounts for itself."""

import subprocess
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
    subprocess.run(["umount", str(path)], check=True)
