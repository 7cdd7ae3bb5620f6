"""Checks of places for files: the tmpfs of arenas, and storage. Their files have no name: nothing is left."""

import errno
import mmap
import os
import secrets
import stat
import time
from pathlib import Path

from fastckpt._core.io.unbuffered import UnbufferedWriter, pass_page_cache, read_some
from fastckpt._core.memory.headroom import headroom, lies_in_memory
from fastckpt._core.policy.node_check import CheckResult, Verdict

_BLOCK = 1 << 20
_NO_TMPFILE = (errno.EISDIR, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOENT)
"""Errors of a file system or a kernel that has no files without a name."""


def check_shm(name: str, directory: str, in_memory: bool, size: int) -> CheckResult:
    """Check the directory of arenas: its kind, its room, the modes of new files, and that it keeps bytes.

    Args:
        name: The name of the result; its value is the room in MB.
        directory: The directory.
        in_memory: True if it has to be on a tmpfs.
        size: Bytes that are written, if there is room for them.
    """
    place = Path(directory)
    if in_memory and not lies_in_memory(place):
        return CheckResult(name, Verdict.PROBLEM, f"{directory} is no tmpfs; name one (--fast-shm-dir)")
    free = headroom(place).free
    if message := _refused_mode(place):
        return CheckResult(name, Verdict.PROBLEM, message, free / 1e6, "MB")
    blocks = max(1, min(size, free) // _BLOCK)
    _, wrong = _write_and_read(place, blocks, seconds=float("inf"))
    message = f"{directory} does not keep bytes: block {wrong} of {blocks} is another" if wrong is not None else ""
    return CheckResult(name, Verdict.PROBLEM if message else Verdict.OK, message, free / 1e6, "MB")


def check_disk(name: str, directory: str, size: int, seconds: float) -> CheckResult:
    """Write durably to a directory, past the page cache where that works, and read it back from storage.

    Args:
        name: The name of the result; its value is the rate of writing in MB/s.
        directory: The directory.
        size: Bytes that are written at most.
        seconds: After which no more is written; one MiB is in any case.
    """
    status = os.statvfs(directory)
    # A small disk is not one that is full; of that there is no room for one block.
    blocks = min(size, status.f_bavail * status.f_frsize // 2) // _BLOCK
    rate, wrong = _write_and_read(Path(directory), max(1, blocks), seconds)
    message = f"{directory} does not keep bytes: block {wrong} is another" if wrong is not None else ""
    return CheckResult(name, Verdict.PROBLEM if message else Verdict.OK, message, rate, "MB/s")


def _refused_mode(directory: Path) -> str:
    """Return why nothing private can be made in a directory; empty if it can."""
    trial = directory / f".fastckpt-check-{os.getpid()}-{secrets.token_hex(4)}"
    trial.mkdir(mode=0o700)
    try:
        status = trial.stat()
    finally:
        trial.rmdir()
    if stat.S_IMODE(status.st_mode) & 0o777 != 0o700:
        return f"what is made with mode 0700 in {directory} gets {stat.S_IMODE(status.st_mode):04o}"
    if status.st_uid != os.geteuid():
        return f"what user {os.geteuid()} makes in {directory} belongs to {status.st_uid}"
    return ""


def _write_and_read(directory: Path, blocks: int, seconds: float) -> tuple[float, int | None]:
    """Write blocks, and read them back; the rate of writing in MB/s, and the first block that was wrong."""
    descriptor = _nameless(directory)
    try:
        seed = secrets.token_bytes(_BLOCK)
        pass_page_cache(descriptor)
        with mmap.mmap(-1, _BLOCK) as buffer, memoryview(buffer) as view:
            writer, written, begin = UnbufferedWriter(descriptor), 0, time.perf_counter()
            while written < blocks and (not written or time.perf_counter() - begin < seconds):
                view[:] = _block(seed, written)
                writer.write(view, written * _BLOCK)
                written += 1
            writer.finish(written * _BLOCK)
            spent = time.perf_counter() - begin
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            pass_page_cache(descriptor)
            wrong = next((n for n in range(written) if not _is_block(descriptor, view, seed, n)), None)
        return written * _BLOCK / spent / 1e6, wrong
    finally:
        os.close(descriptor)


def _block(seed: bytes, number: int) -> bytes:
    """A block that none other equals: a block in the place of another one is found, too."""
    return number.to_bytes(8, "little") + seed[8:]


def _is_block(descriptor: int, view: memoryview, seed: bytes, number: int) -> bool:
    done = 0
    while done < _BLOCK:
        with view[done:] as rest:
            count = read_some(descriptor, rest, number * _BLOCK + done)
        if count == 0:
            return False
        done += count
    return view.tobytes() == _block(seed, number)


def _nameless(directory: Path) -> int:
    """A file that is gone when it is closed; raises OSError."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE or not directory.is_dir():
            raise
    path = directory / f".fastckpt-check-{os.getpid()}-{secrets.token_hex(4)}"
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    path.unlink()
    return descriptor
