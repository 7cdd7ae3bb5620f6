"""Single operations on a mounted file system, each tried by real processes; answers are the words of a table."""

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

from fastckpt._core.io.directory_root import DirectoryRoot
from fastckpt._core.io.durable import sync_directory
from fastckpt._core.io.unbuffered import SECTOR, UnbufferedWriter, create

RENAMES = 1000


def tried(act: Callable[[], str]) -> str:
    """What an operation gives, or the name of its error."""
    try:
        return act()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))


def o_direct(folder: Path) -> str:
    """Whether a file of one sector and a tail is written past the page cache, and holds what was written."""
    path, data = folder / "direct", os.urandom(4 * SECTOR + 100)
    descriptor = create(path, DirectoryRoot(path.parent))
    try:
        opened = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        writer = UnbufferedWriter(descriptor)
        with mmap.mmap(-1, len(data)) as buffer, memoryview(buffer) as view:
            view[:] = data
            with view[: 4 * SECTOR] as sectors:
                writer.write(sectors, 0)
            kept = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
            with view[4 * SECTOR :] as tail:
                writer.write(tail, 4 * SECTOR)
        writer.finish(len(data))
    finally:
        os.close(descriptor)
    assert path.read_bytes() == data
    return "yes" if kept else "at open only" if opened else "refused"


def rename(folder: Path) -> str:
    """How often a look misses a file, or finds it empty, while a child renames others over it."""
    name, home = folder / "name", folder / "home"
    name.write_text("0")
    home.mkdir()
    (home / "file").write_text("x")
    home.rename(folder / "away")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for number in range(RENAMES):
                draft = folder / f"draft-{number}"
                draft.write_text(str(number))
                draft.rename(name)
            code = 0
        finally:
            os._exit(code)
    missed = looks = 0
    while not (status := os.waitpid(child, os.WNOHANG))[0]:
        looks += 1
        try:
            missed += not name.read_text()
        except FileNotFoundError:
            missed += 1
    assert status[1] == 0 and looks
    return f"missed {missed} of {looks}"


def flock(folder: Path) -> str:
    """Whether a lock excludes another process, until its holder is killed."""
    path = folder / "lock"
    hold = "import fcntl, sys; fcntl.flock(file := open(sys.argv[1], 'w'), fcntl.LOCK_EX); print(flush=True); input()"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        fcntl.flock(file, fcntl.LOCK_UN)
        with subprocess.Popen([sys.executable, "-c", hold, path], stdin=PIPE, stdout=PIPE) as holder:
            try:
                assert holder.stdout is not None and holder.stdout.readline()
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return "excludes nobody"
            except BlockingIOError:
                pass
            finally:
                holder.kill()
        fcntl.flock(file, fcntl.LOCK_EX)  # FUSE learns of the death a little later
    return "yes"


def fsync(folder: Path) -> str:
    descriptor = os.open(folder / "synced", os.O_WRONLY | os.O_CREAT)
    try:
        os.write(descriptor, b"x")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(folder)
    return "yes"


def hard_link(folder: Path) -> str:
    path = folder / "linked"
    path.write_text("x")
    os.link(path, folder / "link")
    return "yes" if (folder / "link").read_text() == "x" else "another file"


OPERATIONS: dict[str, Callable[[Path], str]] = {
    "O_DIRECT": o_direct,
    "rename": rename,
    "flock": flock,
    "fsync": fsync,
    "hard links": hard_link,
}


def all_on(folder: Path) -> dict[str, str]:
    folder.mkdir()
    return {name: tried(lambda act=act: act(folder)) for name, act in OPERATIONS.items()}  # type: ignore[misc]
