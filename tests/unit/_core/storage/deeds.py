"""Deeds on a checkpoint directory, recorded, and all that a disk may hold if power is lost in the middle of them."""

import contextlib
import copy
import errno
import os
import random
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.local.layout import TRACKER
from fastckpt._core.storage.share import Share
from tests.unit._core.storage.checkpoints import (
    assert_clean,
    assert_named,
    assert_sound,
    images,
    images_of_node,
    publish,
)
from tests.unit._core.storage.disk import Disk, Tree, restore
from tests.unit._core.storage.killed import Act
from tests.unit._core.storage.recorder import Killed, Operation, Recorder

OLDEST, OLD, NEW = SaveId(0, 1), SaveId(0, 7), SaveId(1, 7)
FILE, USER, WITHIN, BEST = "dir/ckpt.pt", "user/ckpt.pt", "dir/checkpoint-7/sub/mine.pt", "dir/best/"


def at(directory: CheckpointDirectory, path: str) -> str:
    """The path of a user, which is given relative to the directory's parent; none if it is empty."""
    return path and f"{directory.path.parent}/{path}"


def source_of(directory: CheckpointDirectory, name: str = "source") -> Path:
    """A place for images: nothing that is done there is recorded."""
    return directory.path.parent.parent / name


@contextlib.contextmanager
def lower_layer(root: Path) -> Iterator[None]:
    """Let no directory be renamed that is there now, as those in a lower layer of an overlay."""
    lower = {path.lstat().st_ino for path in root.rglob("*") if path.is_dir()}
    real = os.rename

    def rename(source: Any, target: Any, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        found = os.lstat(source, dir_fd=src_dir_fd)
        if stat.S_ISDIR(found.st_mode) and found.st_ino in lower:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, target)
        real(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", rename)
        yield


@dataclass(frozen=True)
class Scene:
    """Something that is done to a directory with two checkpoints, the newer at a path of its user if that is not empty.

    Attributes:
        is_lower: Whether what was there is in the lower layer of an overlay.
        also: Makes what else is there.
    """

    work: Act
    path: str = ""
    is_lower: bool = False
    also: Act = lambda _: None
    is_first: bool = False

    def prepare(self, directory: CheckpointDirectory) -> None:
        if not self.is_first:
            publish(directory, OLDEST)
            publish(directory, OLD, at(directory, self.path))
            self.also(directory)
        for source in directory.path.parent.glob("image-*"):
            shutil.rmtree(source)

    def act(self, directory: CheckpointDirectory) -> None:
        with lower_layer(directory.path) if self.is_lower else contextlib.nullcontext():
            self.work(directory)

    def record(self, path: Path, kill_after: int | None = None) -> "Deed":
        directory = CheckpointDirectory(path / "root/dir")
        self.prepare(directory)
        return record(directory.path.parent, self.act, kill_after=kill_after)


def publishing(id: SaveId, target: str = "", **scene: Any) -> Scene:
    def work(directory: CheckpointDirectory) -> None:
        directory.publish(PublishRequest(id, images(source_of(directory), id), target=at(directory, target)))

    return Scene(work, **scene)


def by_nodes(path: str) -> Scene:
    """Two nodes write their parts; the first to have done so publishes, in place of a step of the same number."""

    def work(directory: CheckpointDirectory) -> None:
        parts = []
        for node in (1, 0):
            source = images_of_node(source_of(directory, f"source-{node}"), NEW, node)
            share = Share(node, 2, target=at(directory, path))
            parts.append(directory.contribute(PublishRequest(NEW, source, world_size=2), share))
        assert parts[0].complete()

    return Scene(work, path)


def by_nodes_in_turn(path: str, last: str) -> Callable[[Path], "Deed"]:
    """One node dies when it has given something its name; the other finds that done, and does the rest."""

    def make(folder: Path) -> "Deed":
        names = [Path(op.to).name for op in by_nodes(path).record(folder / "whole").operations]
        killed = by_nodes(path).record(folder / "killed", kill_after=names.index(last) + 1)

        def act(directory: CheckpointDirectory) -> None:
            source = images_of_node(source_of(directory), NEW, 1)
            share = Share(1, 2, target=at(directory, path))
            assert directory.contribute(PublishRequest(NEW, source, world_size=2), share).complete()

        return record(killed.root, act, after=killed)

    return make


def deleting(path: str) -> Scene:
    return Scene(lambda directory: directory.delete(OLD), path, also=lambda it: publish(it, SaveId(1, 8)))


def _strangers_directory(directory: CheckpointDirectory) -> None:
    (directory.path / "checkpoint-9").mkdir()
    (directory.path / "checkpoint-9/theirs").write_text("theirs")


def _tracker_in_trouble(directory: CheckpointDirectory) -> None:
    """It cannot be written, which nobody minds."""
    (directory.path / TRACKER).unlink()
    (directory.path / TRACKER).mkdir()


def _lower(*names: str) -> dict[str, Scene]:
    return {f"lower_{name}": replace(SCENES[name], is_lower=True) for name in names}


SCENES: dict[str, Scene] = {
    "default": publishing(SaveId(0, 8)),
    "another_history": publishing(NEW),
    "again": publishing(OLD),
    "strangers_directory": publishing(SaveId(0, 9), also=_strangers_directory),
    "tracker_in_trouble": publishing(NEW, also=_tracker_in_trouble),
    "new_target": publishing(NEW, USER),
    "target_overwritten": publishing(NEW, FILE, path=FILE),
    "target_again": publishing(OLD, FILE, path=FILE),
    "target_within": publishing(NEW, WITHIN, path=WITHIN),
    "new_directory": publishing(NEW, "dir/global_step7/"),
    "directory_overwritten": publishing(NEW, BEST, path=BEST),
    "nodes": by_nodes(""),
    "nodes_with_target": by_nodes(USER),
    "nodes_with_directory": by_nodes(BEST),
}
SCENES |= _lower("another_history")
PUBLICATIONS = [*SCENES]
"""Those after which, killed anywhere, a sweep has something to do."""
SCENES |= {
    "first": publishing(OLD, is_first=True),
    "first_with_target": publishing(OLD, "user/user/ckpt.pt", is_first=True),
    "delete": deleting(""),
    "delete_with_target": deleting("dir/user/ckpt.pt"),
    "delete_with_target_within": deleting(WITHIN),
    "delete_directory": deleting(BEST),
}
SCENES |= _lower("strangers_directory", "target_overwritten", "target_again")
SCENES |= _lower("delete", "delete_with_target", "delete_directory")
DEEDS: dict[str, Callable[[Path], "Deed"]] = {name: scene.record for name, scene in SCENES.items()} | {
    "nodes_in_turn": by_nodes_in_turn("", "checkpoint-7"),
    "nodes_in_turn_before_target": by_nodes_in_turn(USER, "checkpoint-7"),
    "nodes_in_turn_with_target": by_nodes_in_turn(USER, "ckpt.pt"),
}


@dataclass
class Deed:
    """What was done below a root, in whose ``dir`` the checkpoints are.

    Attributes:
        start: The files that were there before.
        before, after: What a reader found, newest first.
        begun: How many operations had been made before by others, who are dead.
        puts: Whether it makes the file at the path that a user named; a sweep does not.
    """

    root: Path
    start: Disk
    operations: list[Operation]
    before: list[SaveId]
    after: list[SaveId]
    begun: int = 0
    puts: bool = True

    @property
    def directory(self) -> CheckpointDirectory:
        """A fresh reader."""
        return CheckpointDirectory(self.root / "dir")

    def crashes(self, limit: int, first: int = 0) -> Iterator[tuple[Tree, bool]]:
        """What a disk may hold when power is lost after the first operations, each once, and whether the deed was over.

        Until something is synced nothing is sure, so only then less may be left than before: that is before each sync.
        ``limit`` bounds how many are tried there.
        """
        disk, seen = copy.deepcopy(self.start), set()
        for number in range(len(self.operations) + 1):
            over = number == len(self.operations)
            due = number >= max(first, self.begun) and (over or self.operations[number].kind == "sync")
            for tree in disk.crashes(limit, random.Random(number)) if due else ():
                if (tree, over) not in seen:
                    seen.add((tree, over))
                    yield tree, over
            if not over:
                disk.apply(self.operations[number])

    def check(self, *, over: bool) -> None:
        """A fresh reader finds the old or the new, whole; so it does after a sweep, which leaves nothing behind."""
        scan = self.directory.scan()
        found = assert_sound(self.directory, scan)
        if over and self.puts:
            assert_named(scan)
        # A checkpoint retired for a newer one of its step need not remain.
        lasting = {id for id in {*self.before} & {*self.after} if id.step != self.after[0].step}
        assert found[:1] in ([self.after[:1]] if over else [self.before[:1], self.after[:1]])
        assert lasting <= set(found) <= lasting | set(self.after if over else self.before + self.after)
        self._check_tracker(over)
        gathered = scan.gathered  # if all of its parts are there, the sweep publishes it
        assert not self.directory.sweep() or self.directory.sweep() == []
        scan = self.directory.scan()
        left = assert_sound(self.directory, scan)
        assert left[0] in [found[0], *gathered] if found else set(left) <= set(gathered)
        assert lasting <= set(left) <= {*found, *gathered}
        assert_named(scan, is_over=over and self.puts)
        assert_clean(self.directory)
        owned = {path for stored in scan.places for path in (stored.target, stored.place)}
        files = {path for path in self.root.rglob("*.pt") if "checkpoint-" not in str(path)}
        assert {path for path in files if path.parent not in owned} <= owned
        assert any(self.root.rglob("theirs")) == any(path.endswith("/theirs") for path, _, _ in self.start.tree)

    def _check_tracker(self, over: bool) -> None:
        tracker = self.root / "dir" / TRACKER
        returned = over and not self.begun
        steps = {str(id.step) for id in (self.after[:1] if returned else self.before + self.after)}
        if tracker.is_file():
            assert tracker.read_text() in steps
        elif returned and not tracker.is_dir():
            assert not self.after, "there is no tracker"

    def check_crashes(self, limit: int, since: int = 0) -> int:
        """Read all disks that are tried; returns how many that were."""
        disks = 0
        for tree, over in self.crashes(limit, since):
            restore(tree, self.root)
            self.check(over=over)
            disks += 1
        return disks


def record(
    root: Path, act: Act, *, after: Deed | None = None, kill_after: int | None = None, sound: bool = True
) -> Deed:
    """Do something.

    Args:
        root: Below it all is recorded; the checkpoints are in its ``dir``.
        act: What to do.
        after: What another did before, who died in the middle of it.
        kill_after: How many operations are made before this one dies, too.
        sound: Whether nothing is damaged there; else no ids are recorded.
    """
    root.mkdir(parents=True, exist_ok=True)
    directory = CheckpointDirectory(root / "dir")
    find = assert_sound if sound else lambda directory: []
    before, disk, recorder = after.before if after else find(directory), Disk(root), Recorder(root, kill_after)
    with contextlib.suppress(Killed) if kill_after is not None else contextlib.nullcontext(), recorder.recording():
        act(directory)
    earlier = after.operations if after else []
    opened = max((op.handle for op in earlier), default=0)
    operations = earlier + [replace(op, handle=op.handle + opened) for op in recorder.operations]
    start, puts = after.start if after else disk, act is not CheckpointDirectory.sweep
    replayed = copy.deepcopy(start)
    for op in operations:
        replayed.apply(op)
    assert replayed.tree == Disk(root).tree, "nothing escaped the recorder"
    return Deed(root, start, operations, before, find(directory), len(earlier), puts)


def purposes(deed: Deed) -> list[str]:
    """What each operation is for, if it is a sync: a file, by its later name; or a directory, and its last change."""
    found, latest = [], {}
    for number, op in enumerate(deed.operations):
        path, to = Path(op.path), Path(op.to)
        if op.kind == "rename":
            latest[path.parent] = latest[to.parent] = f"{_plain(path.name)} -> {_plain(to.name)}"
        elif op.kind == "link":
            latest[to.parent] = f"+ {_plain(to.name)}"
        elif op.made or op.kind in ("unlink", "rmdir"):
            latest[path.parent] = f"{'+' if op.made else '-'} {_plain(path.name)}"
        later = [Path(o.to) for o in deed.operations[number:] if o.kind == "rename" and o.path == op.path]
        name = "/".join((*later, path)[0].parts[-2:])
        found.append(_plain(f"{path.name}: {latest[path]}" if path in latest else name) if op.kind == "sync" else "")
    return found


def _plain(name: str) -> str:
    """A name without what differs from time to time."""
    named = re.sub("best|global_step7", "checkpoint-7", name)
    return re.sub("[0-9]+", "N", re.sub("-[0-9a-f]{12}", "-*", named))
