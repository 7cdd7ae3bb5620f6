"""Checks of the file system of a checkpoint directory: its kind, its room, and its treatment of a trial file."""

import errno
import fcntl
import mmap
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from fastckpt._core.byte_sizes import decimal
from fastckpt._core.io.durable import REMEDIES, sync_directory
from fastckpt._core.io.unbuffered import SECTOR, UnbufferedWriter
from fastckpt._core.io.write_rate import open_nameless, write_rate
from fastckpt._core.memory.locks import close_lock, open_lock, try_exclusive
from fastckpt._core.policy.node_check import FLOORS
from fastckpt._core.storage.store import as_path
from fastckpt_run.doctor.diagnosis import Diagnosis, Subject, ok, problem, warning
from fastckpt_run.doctor.mounts import mount_of

MOST_WRITTEN = 32 << 20
FULL, FEW_INODES = 1 << 20, 1000
_NETWORK = ("nfs", "nfs4", "lustre", "ceph", "cifs", "smb3", "beegfs", "gpfs", "glusterfs", "9p", "afs", "wekafs")
_LOST = {
    "tmpfs": "memory: nothing in it outlives this host, and it counts against the memory of jobs",
    "ramfs": "memory: nothing in it outlives this host, and it has no limit",
    "overlay": "the layer of a container: it is removed with it",
}
_ELSEWHERE = "Choose a directory on a disk or a network file system (docker: -v; Kubernetes: a volume)"


def directory(subject: Subject) -> Iterator[Diagnosis]:
    """Check that the directory is there, or can be made, and that this user may write to it."""
    path = Path(as_path(subject.directory)).absolute()
    place = place_of(path)
    is_there = place == path
    found = str(path) if is_there else f"{path} does not exist yet; it will be made in {place}"
    if not place.is_dir():
        yield problem(
            "directory", f"{place} is a file" if place.exists() else f"{place} leads nowhere", "Give a directory"
        )
        return
    status = place.stat()
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        yield problem("directory", f"{found}: the file system is read-only", REMEDIES[errno.EROFS])
    elif not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        mode = stat.S_IMODE(status.st_mode)
        text = f"{found}: user {os.geteuid()} may not write there (owner {status.st_uid}, mode {mode:04o})"
        yield problem("directory", text, REMEDIES[errno.EACCES])
    elif is_there and status.st_uid != os.geteuid():
        text = f"{found} belongs to user {status.st_uid}, and this one is {os.geteuid()}: what one writes, the other"
        remedy = f"chown it, or have them share a group and give --fast-file-mode 0660: chown -R {os.geteuid()} {path}"
        yield warning("directory", f"{text} may not be able to remove", remedy)
    elif is_there and status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        text = f"{found} has mode {stat.S_IMODE(status.st_mode):04o}: all users can replace checkpoints"
        yield warning("directory", text, f"chmod o-w {path}")
    else:
        yield ok("directory", found)


def file_system(subject: Subject) -> Iterator[Diagnosis]:
    """Find the kind of the file system."""
    mount = mount_of(_place(subject))
    if mount is None:
        yield ok("file system", "the kernel does not tell of which kind it is")
        return
    text = f"{mount.kind} of {mount.source}, mounted at {mount.point}"
    if mount.kind in _LOST:
        yield warning("file system", f"{text}: {_LOST[mount.kind]}", _ELSEWHERE)
    elif mount.kind in _NETWORK or mount.kind.startswith("fuse"):
        yield ok("file system", f"{text}: other hosts may share it, and it may stop answering")
    else:
        yield ok("file system", f"{text}: of this host alone; several nodes need one that all share")


def space(subject: Subject) -> Iterator[Diagnosis]:
    """Its free bytes and inodes."""
    place = _place(subject)
    status = os.statvfs(place)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = f"{decimal(free)} free of {decimal(total)}"
    if free < FULL:
        yield problem("space", text, REMEDIES[errno.ENOSPC])
    elif free < total // 20:
        yield warning("space", f"{text}: less than 5 %", REMEDIES[errno.ENOSPC])
    else:
        yield ok("space", text)
    if not status.f_files:
        return
    inodes = f"{status.f_favail:,} of {status.f_files:,} inodes are free"
    if status.f_favail == 0:
        yield problem("inodes", inodes, "Remove files, or make the file system with more inodes")
    elif status.f_favail < FEW_INODES:
        yield warning("inodes", f"{inodes}; each file of a checkpoint takes one", "Remove files there")
    else:
        yield ok("inodes", inodes)


def writes(subject: Subject) -> Iterator[Diagnosis]:
    """Check that it takes bytes, which a quota may refuse although there is space, and measure the rate."""
    place = _place(subject)
    status = os.statvfs(place)
    size = max(FULL, min(MOST_WRITTEN, status.f_bavail * status.f_frsize // 2))
    try:
        rate = write_rate(place, size)
    except OSError as error:
        what = "the quota of this user is used up" if error.errno == errno.EDQUOT else error.strerror
        remedy = REMEDIES.get(error.errno or 0, "Choose another directory")
        yield problem("writes", f"{decimal(size)} could not be written to {place}: {what}", remedy)
        return
    text = f"{decimal(size)} became durable at {decimal(int(rate))}/s"
    least = FLOORS["disk"] * 1e6
    if size == MOST_WRITTEN and rate < least:
        yield warning(
            "writes", f"{text}, which only a broken or overloaded disk misses", "fastckpt check DIR measures it"
        )
    else:
        yield ok("writes", text)


def direct_writes(subject: Subject) -> Iterator[Diagnosis]:
    """Check that files can be written past the page cache."""
    descriptor = open_nameless(_place(subject))
    try:
        takes = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        with mmap.mmap(-1, SECTOR) as buffer, memoryview(buffer) as view:
            UnbufferedWriter(descriptor).write(view, 0)
        still = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
    finally:
        os.close(descriptor)
    if takes and still:
        yield ok("direct writes", "O_DIRECT works: persists take no page cache")
    else:
        how = "refuses O_DIRECT" if not takes else "takes O_DIRECT, and refuses writes with it"
        yield ok("direct writes", f"it {how}: persists go through the page cache, block by block")


def names(subject: Subject) -> Iterator[Diagnosis]:
    """Check that a rename replaces a file, that a name can be made only once, and that both can be made durable."""
    with _trial(_place(subject)) as folder:
        one, other = folder / "one", folder / "other"
        for path, data in ((one, b"new"), (other, b"old")):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        one.rename(other)
        sync_directory(folder)
        if other.read_bytes() != b"new" or one.exists():
            yield problem("names", "a rename did not replace the file of that name", _ELSEWHERE)
            return
        try:
            os.close(os.open(other, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            yield ok("names", "rename, exclusive creation and fsync work")
        else:
            text = "a name that is taken was made a second time: two jobs could not be told apart"
            yield problem("names", text, _ELSEWHERE)


def locks(subject: Subject) -> Iterator[Diagnosis]:
    """Check that flock excludes others."""
    with _trial(_place(subject)) as folder:
        first, second = open_lock(folder / "lock"), open_lock(folder / "lock")
        try:
            is_exclusive = try_exclusive(first) and not try_exclusive(second)
        except OSError as error:
            yield ok("locks", f"flock does not work ({error.strerror}), and is done without")
            return
        finally:
            close_lock(first)
            close_lock(second)
    if is_exclusive:
        yield ok("locks", "flock works")
    else:
        text = "flock keeps nobody out: what a live job writes may be taken for the remains of a dead one"
        yield warning(
            "locks", text, "Mount it with locks (nfs: without nolock or local_lock), or take another directory"
        )


def place_of(path: Path) -> Path:
    """A path, or the nearest above it that is there."""
    return next(each for each in (path, *path.parents) if os.path.lexists(each))


def _place(subject: Subject) -> Path:
    place = place_of(Path(as_path(subject.directory)).absolute())
    if not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    return place


@contextmanager
def _trial(place: Path) -> Iterator[Path]:
    """A folder of this process in a directory, which is removed."""
    folder = place / f".fastckpt-doctor-{os.getpid()}-{token_hex(4)}"
    folder.mkdir(0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
