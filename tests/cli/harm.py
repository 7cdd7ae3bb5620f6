"""Damage to a file, of each kind."""

import os
import shutil
from pathlib import Path


def flip(path: Path) -> None:
    """One bit in the middle, as a disk does it: which tells nobody."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(times.st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def remove(path: Path) -> None:
    path.unlink()


def directory_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangling_link_instead(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


ALL = [flip, truncate, empty, remove, directory_instead, dangling_link_instead, lengthen]


def lose(path: Path) -> None:
    shutil.rmtree(path)
