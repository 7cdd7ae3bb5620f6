"""A real FUSE file system over a directory, whose operations fail on command: ``fuse_server.py BACKING MOUNT ORDERS``.

It speaks the kernel's protocol on /dev/fuse by itself, so it needs root and no library. ``ORDERS`` is a file of JSON,
which is read again whenever it has changed:

    {"fail": {"FSYNC": "EIO"}}      answers of operations, by their names in `OPERATIONS`
    {"no_direct": true}             open refuses O_DIRECT
    {"keeps_direct": true}          what was opened with O_DIRECT takes nothing else, as with mergerfs
    {"torn_rename": true}           a directory is renamed file by file, and the server dies after the first
    {"stale_reads": 1}              so many reads meet a file that was replaced on the server
    {"rename_directory": "EXDEV"}   no directory can be renamed
"""

import ctypes
import errno
import fcntl
import json
import os
import signal
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

OPERATIONS = {
    1: "LOOKUP", 2: "FORGET", 3: "GETATTR", 4: "SETATTR", 9: "MKDIR",
    10: "UNLINK", 11: "RMDIR", 12: "RENAME", 13: "LINK", 14: "OPEN", 15: "READ", 16: "WRITE", 17: "STATFS",
    18: "RELEASE", 20: "FSYNC", 25: "FLUSH", 26: "INIT", 27: "OPENDIR", 28: "READDIR", 29: "RELEASEDIR",
    30: "FSYNCDIR", 32: "SETLK", 33: "SETLKW", 35: "CREATE", 36: "INTERRUPT", 38: "DESTROY", 42: "BATCH_FORGET",
    45: "RENAME2",
}  # fmt: skip
"""Requests of the kernel; what is not among them is answered with ENOSYS."""
WITHOUT_ANSWER = ("FORGET", "BATCH_FORGET", "INTERRUPT")
MOST_WRITTEN = 1 << 17
BIG_WRITES, DONT_MASK, FLOCK_LOCKS = 1 << 5, 1 << 6, 1 << 10
MODE, SIZE, ATIME, MTIME, ATIME_NOW, MTIME_NOW = 1, 8, 16, 32, 128, 256
ROOT = 1
THREADS = 6


def names(data: bytes, skip: int) -> list[str]:
    return [os.fsdecode(name) for name in data[skip:].split(b"\0")[:-1]]


class Server:
    """Answers requests, in several threads: one may wait for a lock while others go on."""

    def __init__(self, backing: Path, device: int, orders: Path) -> None:
        self._device = device
        self._orders_file = orders
        self._stamp: tuple[int, int] | None = None
        self._orders: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._paths = {ROOT: str(backing)}
        self._listed: dict[int, list[bytes]] = {}
        self._handles: dict[int, list[int]] = {}
        self._direct: set[int] = set()

    def serve(self) -> None:
        while True:
            try:
                data = os.read(self._device, MOST_WRITTEN + 4096)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                os._exit(0)  # ENODEV: it was unmounted
            _, code, unique, node = struct.unpack_from("<IIQQ", data)
            try:
                answer, number = self._answer(code, node, data[40:]), 0
            except OSError as error:
                answer, number = b"", error.errno or errno.EIO
            if OPERATIONS.get(code) not in WITHOUT_ANSWER:
                with suppress(OSError):  # who asked was killed
                    os.write(self._device, struct.pack("<IiQ", 16 + len(answer), -number, unique) + answer)

    def _answer(self, code: int, node: int, data: bytes) -> bytes:
        self._read_orders()
        name = OPERATIONS.get(code)
        if name is None:
            raise OSError(errno.ENOSYS, "unknown")
        failures = self._orders.get("fail", {})
        if name in failures:
            raise OSError(getattr(errno, failures[name]), name)
        method: Callable[[int, bytes], bytes] = getattr(self, f"on_{name.lower()}")
        return method(node, data)

    def _read_orders(self) -> None:
        with suppress(FileNotFoundError):
            found = self._orders_file.stat()
            if self._stamp != (found.st_ino, found.st_mtime_ns):
                self._orders, self._stamp = json.loads(self._orders_file.read_text()), (found.st_ino, found.st_mtime_ns)

    # --- names

    def _path(self, node: int, name: str = "") -> str:
        path = self._paths.get(node)
        if path is None:
            raise OSError(errno.ESTALE, "no such node")
        return f"{path}/{name}" if name else path

    def _entry(self, path: str) -> bytes:
        found = os.lstat(path)
        with self._lock:
            self._paths[found.st_ino] = path
        return struct.pack("<QQQQII", found.st_ino, 0, 0, 0, 0, 0) + self._attributes(found)

    @staticmethod
    def _attributes(found: os.stat_result) -> bytes:
        times = [divmod(time, 10**9) for time in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)]
        return struct.pack(
            "<6Q10I", found.st_ino, found.st_size, found.st_blocks, *(each[0] for each in times),
            *(each[1] for each in times), found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev,
            4096, 0,
        )  # fmt: skip

    def on_init(self, node: int, data: bytes) -> bytes:
        major, _, ahead, offered = struct.unpack_from("<4I", data)
        flags = offered & (BIG_WRITES | DONT_MASK | FLOCK_LOCKS)
        return struct.pack("<4I2H2I2H8I", major, 31, ahead, flags, 12, 9, MOST_WRITTEN, 1, 0, 0, *[0] * 8)

    def on_destroy(self, node: int, data: bytes) -> bytes:
        return b""

    on_forget = on_batch_forget = on_interrupt = on_destroy

    def on_lookup(self, node: int, data: bytes) -> bytes:
        return self._entry(self._path(node, names(data, 0)[0]))

    def _stat(self, node: int) -> os.stat_result:
        handles = self._handles.get(node)
        if handles:
            return os.fstat(handles[-1])  # it may have lost its name
        return os.lstat(self._path(node))

    def on_getattr(self, node: int, data: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attributes(self._stat(node))

    def on_setattr(self, node: int, data: bytes) -> bytes:
        valid, _, _, size, _, atime, mtime, _, anano, mnano, _, mode = struct.unpack_from("<II6Q3II", data)
        handles = self._handles.get(node)
        target: int | str = handles[-1] if handles else self._path(node)
        if valid & SIZE:
            with suppress(IndexError):
                target = next(each for each in handles or [] if fcntl.fcntl(each, fcntl.F_GETFL) & os.O_ACCMODE)
            os.truncate(target, size)
        if valid & MODE:
            os.chmod(target, stat.S_IMODE(mode))
        if valid & (ATIME | MTIME):
            now, was = time.time_ns(), self._stat(node)
            atime_ns = now if valid & ATIME_NOW else atime * 10**9 + anano if valid & ATIME else was.st_atime_ns
            mtime_ns = now if valid & MTIME_NOW else mtime * 10**9 + mnano if valid & MTIME else was.st_mtime_ns
            os.utime(target, ns=(atime_ns, mtime_ns))
        return self.on_getattr(node, b"")

    def on_mkdir(self, node: int, data: bytes) -> bytes:
        mode, umask = struct.unpack_from("<2I", data)
        path = self._path(node, names(data, 8)[0])
        os.mkdir(path, mode & ~umask)
        return self._entry(path)

    def on_unlink(self, node: int, data: bytes) -> bytes:
        os.unlink(self._path(node, names(data, 0)[0]))
        return b""

    def on_rmdir(self, node: int, data: bytes) -> bytes:
        os.rmdir(self._path(node, names(data, 0)[0]))
        return b""

    def on_rename(self, node: int, data: bytes, skip: int = 8) -> bytes:
        (new,) = struct.unpack_from("<Q", data)
        old_name, new_name = names(data, skip)
        source, target = self._path(node, old_name), self._path(new, new_name)
        with self._lock:
            if os.path.isdir(source) and (refusal := self._orders.get("rename_directory")):
                raise OSError(getattr(errno, refusal), "rename")
            if self._orders.get("torn_rename") and os.path.isdir(source):
                self._tear(source, target)
            os.rename(source, target)
            for number, path in self._paths.items():
                if path == source or path.startswith(source + "/"):
                    self._paths[number] = target + path[len(source) :]
        return b""

    @staticmethod
    def _tear(source: str, target: str) -> None:
        os.makedirs(target)
        first = sorted(os.listdir(source))[0]
        os.rename(f"{source}/{first}", f"{target}/{first}")
        os.kill(os.getpid(), signal.SIGKILL)

    def on_rename2(self, node: int, data: bytes) -> bytes:
        if struct.unpack_from("<QI", data)[1]:
            raise OSError(errno.EINVAL, "flags")
        return self.on_rename(node, data, 16)

    def on_link(self, node: int, data: bytes) -> bytes:
        (old,) = struct.unpack_from("<Q", data)
        path = self._path(node, names(data, 8)[0])
        os.link(self._path(old), path)
        return self._entry(path)

    # --- open files

    def _opened(self, node: int, handle: int, flags: int) -> bytes:
        with self._lock:
            self._handles.setdefault(node, []).append(handle)
            if flags & os.O_DIRECT:
                self._direct.add(handle)
        return struct.pack("<QII", handle, 0, 0)

    def _refuse_direct(self, flags: int) -> None:
        if self._orders.get("no_direct") and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "O_DIRECT")

    @staticmethod
    def _backing(path: str, flags: int, mode: int = 0) -> int:
        # O_DIRECT is between the kernel and who opened the file: this process takes any bytes.
        return os.open(path, flags & ~(os.O_DIRECT | os.O_APPEND) | os.O_CLOEXEC, mode)

    def on_open(self, node: int, data: bytes) -> bytes:
        (flags,) = struct.unpack_from("<I", data)
        self._refuse_direct(flags)
        return self._opened(node, self._backing(self._path(node), flags & ~(os.O_CREAT | os.O_EXCL)), flags)

    def on_create(self, node: int, data: bytes) -> bytes:
        flags, mode, umask, _ = struct.unpack_from("<4I", data)
        path = self._path(node, names(data, 16)[0])
        handle = self._backing(path, flags | os.O_CREAT, mode & ~umask)
        try:
            self._refuse_direct(flags)  # when the file is there, as on local file systems
        except OSError:
            os.close(handle)
            raise
        entry = self._entry(path)
        return entry + self._opened(os.fstat(handle).st_ino, handle, flags)

    def on_read(self, node: int, data: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", data)
        with self._lock:
            stale = self._orders.get("stale_reads", 0)
            self._orders["stale_reads"] = max(0, stale - 1)
        if stale:
            raise OSError(errno.ESTALE, "replaced")
        return os.pread(handle, size, offset)

    def on_write(self, node: int, data: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", data)
        if self._orders.get("keeps_direct") and handle in self._direct and (offset | size) % 4096:
            raise OSError(errno.EINVAL, "not aligned")
        return struct.pack("<II", os.pwrite(handle, data[40 : 40 + size], offset), 0)

    def on_flush(self, node: int, data: bytes) -> bytes:
        return b""

    def on_fsync(self, node: int, data: bytes) -> bytes:
        handle, flags = struct.unpack_from("<QI", data)
        os.fdatasync(handle) if flags & 1 else os.fsync(handle)
        return b""

    def on_release(self, node: int, data: bytes) -> bytes:
        (handle,) = struct.unpack_from("<Q", data)
        with self._lock:
            self._handles[node].remove(handle)
            self._direct.discard(handle)
            if not self._handles[node]:
                del self._handles[node]
        os.close(handle)  # which gives up its flock
        return b""

    def on_setlk(self, node: int, data: bytes) -> bytes:
        handle, _, _, _, kind = struct.unpack_from("<4QI", data)
        fcntl.flock(handle, {0: fcntl.LOCK_SH, 1: fcntl.LOCK_EX, 2: fcntl.LOCK_UN}[kind] | fcntl.LOCK_NB)
        return b""

    def on_setlkw(self, node: int, data: bytes) -> bytes:
        while True:
            try:
                return self.on_setlk(node, data)
            except BlockingIOError:
                time.sleep(0.01)

    def on_opendir(self, node: int, data: bytes) -> bytes:
        handle = os.open(self._path(node), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        entries = []
        with os.scandir(handle) as found:
            for number, entry in enumerate(found, 1):
                name, kind = os.fsencode(entry.name), stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode) >> 12
                head = struct.pack("<QQII", entry.inode(), number, len(name), kind)
                entries.append((head + name).ljust(-(-(24 + len(name)) // 8) * 8, b"\0"))
        self._listed[handle] = entries
        return struct.pack("<QII", handle, 0, 0)

    def on_readdir(self, node: int, data: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", data)
        answer = b""
        for entry in self._listed[handle][offset:]:
            if len(answer) + len(entry) > size:
                break
            answer += entry
        return answer

    def on_releasedir(self, node: int, data: bytes) -> bytes:
        (handle,) = struct.unpack_from("<Q", data)
        self._listed.pop(handle)
        os.close(handle)
        return b""

    def on_fsyncdir(self, node: int, data: bytes) -> bytes:
        os.fsync(struct.unpack_from("<Q", data)[0])
        return b""

    def on_statfs(self, node: int, data: bytes) -> bytes:
        found = os.statvfs(self._path(node))
        blocks = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<5Q10I", *blocks, found.f_bsize, found.f_namemax, found.f_frsize, 0, *[0] * 6)


def mount(target: Path) -> int:
    """Mount on a directory; the descriptor over which the kernel asks."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other,max_read=131072"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"fastckpt-test", os.fsencode(target), b"fuse.fastckpt-test", 0, options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))
    return device


def main(backing: Path, target: Path, orders: Path) -> None:
    server = Server(backing, mount(target), orders)
    for _ in range(THREADS - 1):
        threading.Thread(target=server.serve, daemon=True).start()
    print("mounted", flush=True)
    server.serve()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
