"""File systems that a test mounts below a folder, with kernel drivers and real FUSE programs; needs root."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SIZE = 400 << 20
"""Of images, which are sparse: xfs makes none that is smaller than 300 MiB."""
DEADLINE = 20.0
HERE = Path(__file__).parent


class Unavailable(Exception):
    """What this machine lacks for a file system."""


class Mounted:
    """A file system on a path, and the process that serves it, if there is one."""

    def __init__(self, path: Path, server: subprocess.Popen[str] | None = None, orders: Path | None = None) -> None:
        self.path = path
        self.server = server
        self._orders = orders

    def order(self, text: str = "{}") -> None:
        """Have our own FUSE server fail from now on, in the words of fuse_server.py."""
        assert self._orders is not None
        draft = self._orders.with_suffix(".draft")
        draft.write_text(text)
        draft.rename(self._orders)


Mount = Callable[[Path], contextlib.AbstractContextManager[Mounted]]


def needs(*programs: str, kernel: str = "") -> None:
    """Raise Unavailable unless these can be had."""
    missing = [name for name in programs if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    if missing:
        raise Unavailable(f"no {', '.join(missing)}")
    if os.geteuid() != 0:
        raise Unavailable("not root")
    if kernel and kernel not in Path("/proc/filesystems").read_text().split():
        raise Unavailable(f"a kernel without {kernel}")
    if kernel == "fuse" and not Path("/dev/fuse").exists():
        raise Unavailable("no /dev/fuse")


def run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}")


def unmount(path: Path) -> None:
    """Unmount, at once if nobody uses it, else as soon as nobody does."""
    if subprocess.run(["umount", str(path)], capture_output=True, check=False).returncode:
        subprocess.run(["umount", "--lazy", str(path)], capture_output=True, check=False)


def folder_of(folder: Path, *names: str) -> list[Path]:
    paths = [folder / name for name in names]
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    return paths


@contextlib.contextmanager
def by_kernel(folder: Path, *arguments: object) -> Iterator[Mounted]:
    (target,) = folder_of(folder, "mounted")
    run("mount", *arguments, target)
    try:
        yield Mounted(target)
    finally:
        unmount(target)


def made_image(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "image").touch()
    os.truncate(folder / "image", SIZE)
    return folder / "image"


def on_device(kernel: str, *make: str, options: str = "") -> Mount:
    """A file system on a device of its own: an image."""

    @contextlib.contextmanager
    def mount(folder: Path) -> Iterator[Mounted]:
        needs(make[0], "losetup", kernel=kernel)
        image = made_image(folder)
        run(*make, image)
        with by_kernel(folder, "-t", kernel, "-o", f"loop,{options}".rstrip(","), image) as mounted:
            yield mounted
        image.unlink()

    return mount


def tmpfs(folder: Path) -> contextlib.AbstractContextManager[Mounted]:
    needs()
    return by_kernel(folder, "-t", "tmpfs", "-o", "size=400m", "tmpfs")


def overlay(options: str = "") -> Mount:
    """Upper and lower directories of the file system that the folder is on."""

    @contextlib.contextmanager
    def mount(folder: Path) -> Iterator[Mounted]:
        needs(kernel="overlay")
        lower, upper, work = folder_of(folder, "lower", "upper", "work")
        layers = f"lowerdir={lower},upperdir={upper},workdir={work}{options}"
        with by_kernel(folder, "-t", "overlay", "-o", layers, "overlay") as mounted:
            yield mounted

    return mount


@contextlib.contextmanager
def served(folder: Path, command: list[object], ready: Callable[[Path], bool] = os.path.ismount) -> Iterator[Mounted]:
    """A FUSE file system of a program that stays in the foreground; ``{}`` in the command is the mount point."""
    (target,) = folder_of(folder, "mounted")
    orders, log = folder / "orders", folder / "server.log"
    orders.write_text("{}")
    words = [str(target) if word == "{}" else str(word) for word in command]
    with log.open("w") as output:
        server = subprocess.Popen(words, stdout=output, stderr=output, stdin=subprocess.DEVNULL, text=True)
    try:
        end = time.monotonic() + DEADLINE
        while not ready(target):
            if server.poll() is not None or time.monotonic() > end:
                raise Unavailable(f"{words[0]}: {log.read_text().strip()}")
            time.sleep(0.02)
        yield Mounted(target, server, orders)
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.send_signal(signal.SIGCONT)
        unmount(target)
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@contextlib.contextmanager
def own_fuse(folder: Path, orders: str = "{}") -> Iterator[Mounted]:
    """Our own server, which fails on command."""
    needs(kernel="fuse")
    (backing,) = folder_of(folder, "backing")
    command = [sys.executable, HERE / "fuse_server.py", backing, "{}", folder / "orders"]
    with served(folder, command) as mounted:
        mounted.order(orders)
        yield mounted


def with_orders(orders: str) -> Mount:
    return lambda folder: own_fuse(folder, orders)


def fuse_program(program: str, *command: object) -> Mount:
    """A FUSE program over a directory; ``backing`` in the command is that directory, ``{}`` the mount point."""

    @contextlib.contextmanager
    def mount(folder: Path) -> Iterator[Mounted]:
        needs(program, kernel="fuse")
        parts = ("backing", "lower", "upper", "work")
        paths = dict(zip(parts, folder_of(folder, *parts), strict=True))
        words = [word.format("{}", **paths) if isinstance(word, str) else word for word in (program, *command)]
        with served(folder, words) as mounted:
            yield mounted

    return mount


@contextlib.contextmanager
def sshfs(folder: Path) -> Iterator[Mounted]:
    """The SFTP server of OpenSSH, over a pipe instead of a connection."""
    needs("sshfs", kernel="fuse")
    (backing,) = folder_of(folder, "backing")
    server = next((p for p in ("/usr/lib/openssh/sftp-server", "/usr/libexec/sftp-server") if Path(p).exists()), "")
    if not server:
        raise Unavailable("no sftp-server")
    script = folder / "ssh"
    script.write_text(f"#!/bin/sh\nexec {server}\n")
    script.chmod(0o700)
    with served(folder, ["sshfs", "-f", "-o", f"ssh_command={script}", f"nobody:{backing}", "{}"]) as mounted:
        yield mounted


@contextlib.contextmanager
def ntfs_3g(folder: Path) -> Iterator[Mounted]:
    needs("mkntfs", "ntfs-3g", kernel="fuse")
    image = made_image(folder)
    run("mkntfs", "-Q", "-F", image)
    with served(folder, ["ntfs-3g", "-o", "no_detach", image, "{}"]) as mounted:
        yield mounted


FILE_SYSTEMS: dict[str, Mount] = {
    "ext4": on_device("ext4", "mkfs.ext4", "-q"),
    "ext4, data=writeback": on_device("ext4", "mkfs.ext4", "-q", options="data=writeback"),
    "ext4, data=journal": on_device("ext4", "mkfs.ext4", "-q", options="data=journal"),
    "xfs": on_device("xfs", "mkfs.xfs", "-q"),
    "btrfs": on_device("btrfs", "mkfs.btrfs", "-q"),
    "btrfs, compress=zstd": on_device("btrfs", "mkfs.btrfs", "-q", options="compress-force=zstd"),
    "tmpfs": tmpfs,
    "overlay": overlay(),
    "overlay, volatile": overlay(",volatile"),
    "FUSE": own_fuse,
    "FUSE without O_DIRECT": with_orders('{"no_direct": true}'),
    "FUSE without flock": with_orders('{"fail": {"SETLK": "ENOSYS", "SETLKW": "ENOSYS"}}'),
    "FUSE without hard links": with_orders('{"fail": {"LINK": "EPERM"}}'),
    "FUSE without fsync": with_orders('{"fail": {"FSYNC": "ENOSYS", "FSYNCDIR": "ENOSYS"}}'),
    "FUSE that keeps O_DIRECT": with_orders('{"keeps_direct": true}'),
    "bindfs": fuse_program("bindfs", "-f", "{backing}", "{}"),
    "mergerfs": fuse_program("mergerfs", "-f", "{backing}:{lower}", "{}"),
    "fuse-overlayfs": fuse_program(
        "fuse-overlayfs", "-f", "-o", "lowerdir={lower},upperdir={upper},workdir={work}", "{}"
    ),
    "sshfs": sshfs,
    "ntfs-3g": ntfs_3g,
}


def mounted(stack: contextlib.ExitStack, folder: Path, mount: Mount) -> Mounted:
    """Mount until the end of a test; skips it where that cannot be had, and says why."""
    try:
        return stack.enter_context(mount(folder / "file-system"))
    except Unavailable as missing:
        pytest.skip(f"this needs a file system that cannot be mounted here: {missing}")


_WITH_VERSION = ("bindfs", "mergerfs", "fuse-overlayfs", "sshfs", "ntfs-3g")


def version_of(name: str) -> str:
    """Of the program that serves a file system, or of the kernel."""
    if name not in _WITH_VERSION:
        return f"Linux {'.'.join(os.uname().release.split('.')[:2])}"
    done = subprocess.run([name, "--version"], capture_output=True, text=True, check=False)
    found = re.search(rf"(?is)\b{name}\D*(\d+(?:\.\d+)+)", done.stdout + done.stderr)
    return found.group(1) if found else "of unknown version"
