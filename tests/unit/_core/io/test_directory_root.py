"""Operations below a directory never act on what a link in it leads to, and wait for no pipe."""

import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fastckpt._core.io import modes
from fastckpt._core.io.directory_root import DirectoryRoot
from fastckpt._core.io.regular_file import open_regular, read_small


@pytest.fixture
def root(tmp_path: Path) -> DirectoryRoot:
    """One whose names ``away``, ``file-link`` and ``loop`` are links, the first to a directory outside."""
    (tmp_path / "root/inner").mkdir(parents=True)
    (tmp_path / "outside/deep").mkdir(parents=True)
    (tmp_path / "outside/theirs").write_text("theirs")
    (tmp_path / "root/inner/own").write_text("own")
    (tmp_path / "root/away").symlink_to(tmp_path / "outside")
    (tmp_path / "root/file-link").symlink_to(tmp_path / "outside/theirs")
    (tmp_path / "root/loop").symlink_to("loop")
    return DirectoryRoot(tmp_path / "root")


ACTS: dict[str, Callable[[DirectoryRoot, Path], object]] = {
    "open": lambda root, path: root.open(path, os.O_WRONLY | os.O_CREAT),
    "write_text": lambda root, path: root.write_text(path, "x"),
    "make_directory": lambda root, path: root.make_directory(path, parents=True),
    "rename": lambda root, path: root.rename(path, root.path / "mine"),
    "rename to": lambda root, path: root.rename(root.path / "inner/own", path),
    "move": lambda root, path: root.move(root.path / "inner", path),
    "link": lambda root, path: root.link(path, root.path / "mine"),
    "link to": lambda root, path: root.link(root.path / "inner/own", path),
    "copy_link to": lambda root, path: root.copy_link(root.path / "loop", path),
    "unlink": lambda root, path: root.unlink(path),
    "remove": lambda root, path: root.remove(path),
    "remove_empty": lambda root, path: root.remove_empty(path),
    "sync": lambda root, path: root.sync(path),
    "sync_tree": lambda root, path: root.sync_tree(path),
    "lstat": lambda root, path: root.lstat(path),
    "entries": lambda root, path: root.entries(path),
    "latest_change": lambda root, path: root.latest_change(path),
}


def snapshot(folder: Path) -> list[tuple[str, int, int, int]]:
    found = [(path, path.lstat()) for path in sorted(folder.rglob("*"))]
    return [(str(path), each.st_ino, each.st_mtime_ns, each.st_nlink) for path, each in found]


OUTSIDE = ["away/theirs", "away/deep", "away/new", "away/deep/../theirs", "../outside/theirs"]


@pytest.mark.parametrize("act", ACTS)
def test_nothing_outside_is_touched_through_a_link_or_by_a_path_upward(root, tmp_path, act):
    before = snapshot(tmp_path / "outside")
    for path in (root.path / name for name in OUTSIDE):
        if act in ("remove", "remove_empty"):
            ACTS[act](root, path)  # as far as that is possible
        else:
            with pytest.raises(OSError, match=r"is a link, which is not followed|is not within") as error:
                ACTS[act](root, path)
            assert str(error.value.filename).startswith(str(root.path)), "it names the path"
        assert snapshot(tmp_path / "outside") == before, path
    assert (root.path / "inner/own").read_text() == "own"


def test_a_link_itself_is_removed_moved_and_never_opened(root, tmp_path):
    before = snapshot(tmp_path / "outside")
    for name in ("away", "file-link", "loop"):
        for act in ("open", "sync", "entries"):
            with pytest.raises(OSError, match=name):
                ACTS[act](root, root.path / name)
        root.move(root.path / name, root.path / "moved")
        assert (root.path / "moved").is_symlink() and not root.is_directory(root.path / "moved")
        root.remove(root.path / "moved")
        assert not root.exists(root.path / "moved") and snapshot(tmp_path / "outside") == before


def test_a_directory_that_becomes_a_link_on_the_way_is_noticed(root, tmp_path, monkeypatch):
    """Whoever may write there swaps it after it was looked at: what is open stays what it is."""
    before, real, path = snapshot(tmp_path / "outside"), os.open, root.path / "inner/own"

    def swap(name, *more, **named):
        if name == "inner":
            shutil.move(root.path / "inner", root.path / "kept")
            (root.path / "inner").symlink_to(tmp_path / "outside")
        return real(name, *more, **named)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(OSError, match="is a link"):
        root.write_text(path, "x")
    assert snapshot(tmp_path / "outside") == before


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": make_socket,
    "directory": Path.mkdir,
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to an endless file": lambda path: path.symlink_to("/dev/zero"),
    "sparse file": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
}


def test_small_files_are_regular_and_bounded_and_nobody_waits_for_others(root):
    for kind, make in KINDS.items():
        make(path := root.path / kind)
        with pytest.raises(OSError, match=kind):
            read_small(path)
        if kind != "sparse file":
            for opened in (lambda path=path: open_regular(path), lambda path=path: root.open(path, os.O_RDWR)):
                with pytest.raises(OSError, match=kind):
                    opened()
    (root.path / "file").write_bytes(b"x" * 10)
    (root.path / "link").symlink_to("file")
    assert read_small(root.path / "file", 10) == read_small(root.path / "link", follow=True) == b"x" * 10
    with pytest.raises(OSError, match="more than 9 bytes"):
        read_small(root.path / "file", 9)


def test_a_tree_that_is_deeper_than_the_stack_stays_and_raises_nothing(root):
    inner = os.open(root.path, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("x", dir_fd=inner)
        outer, inner = inner, os.open("x", os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(inner)
    root.remove(root.path / "x")
    subprocess.run(["rm", "-rf", root.path], check=True)  # else the test's folder could not be removed either


def test_modes_are_those_that_the_user_chose(root, monkeypatch):
    monkeypatch.setattr(modes, "_chosen", 0o640)
    root.make_directory(root.path / "a/b", parents=True, durable=True)
    root.write_text(root.path / "a/b/c", "x")
    assert stat.S_IMODE((root.path / "a/b").stat().st_mode) == 0o750
    assert stat.S_IMODE((root.path / "a/b/c").stat().st_mode) == 0o640
    assert root.entries(root.path / "a/b") == [("c", False, False, (root.path / "a/b/c").stat().st_ino)]
    assert root.entries(root.path)[0].name == "a" and root.exists(root.path / "a/b/c")
