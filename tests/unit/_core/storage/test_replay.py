"""Power that is lost anywhere leaves the old or the new checkpoint whole, whatever was not synced by then.

Each deed is recorded once; all that a disk may hold after each of its operations is then made and read. Where that
is too much, a part of it is chosen, the same in every run; the campaign leaves nothing out.
"""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import Manifest
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local import part_files
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.share import Share
from fastckpt.errors import FastckptError
from tests.unit._core.storage.checkpoints import images, images_of_node, publish
from tests.unit._core.storage.deeds import Deed, purposes, record
from tests.unit._core.storage.disk import restore
from tests.unit._core.storage.scenes import BEST, NEW, OLD, OLDEST, SCENES, WITHIN, prepare

USER = "user/ckpt.pt"
LIMIT = 4
"""Disks that are tried after one operation, beside those of a journal that keeps order, if there are more."""


@contextmanager
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


def publishing(scene: str, *, lower: bool = False) -> Callable[..., Deed]:
    """A publication to what is there in a scene, perhaps in a lower layer."""

    def make(path: Path, kill_after: int | None = None) -> Deed:
        id, target = prepare(scene, CheckpointDirectory(path / "root/dir"))
        _forget_sources(path)
        return _publish(path, id, target, kill_after, lower=lower)

    return make


def first(target: str) -> Callable[[Path], Deed]:
    """The directory does not exist before."""
    return lambda path: _publish(path, OLD, target and f"{path}/root/{target}")


def deleting(target: str, *, lower: bool = False) -> Callable[[Path], Deed]:
    def make(path: Path) -> Deed:
        directory = CheckpointDirectory(path / "root/dir")
        publish(directory, OLDEST)
        publish(directory, OLD, target and f"{path}/root/{target}")
        publish(directory, SaveId(1, 8))
        _forget_sources(path)

        def act(directory: CheckpointDirectory) -> None:
            with lower_layer(directory.path) if lower else nullcontext():
                directory.delete(OLD)

        return record(path / "root", act)

    return make


def by_nodes(target: str) -> Callable[..., Deed]:
    """Two nodes write their parts; the first to have done so publishes, in place of a step of the same number."""

    def make(path: Path, kill_after: int | None = None) -> Deed:
        directory, named = CheckpointDirectory(path / "root/dir"), target and f"{path}/root/{target}"
        publish(directory, OLDEST)
        publish(directory, OLD, named)
        _forget_sources(path)
        sources = [images_of_node(path / f"source-{node}", NEW, node) for node in range(2)]

        def act(directory: CheckpointDirectory) -> None:
            shares = [Share(node, 2, target=named) for node in range(2)]
            first, _ = [directory.contribute(PublishRequest(NEW, sources[n], world_size=2), shares[n]) for n in (1, 0)]
            assert first.complete()

        return record(path / "root", act, kill_after=kill_after)

    return make


def by_nodes_in_turn(target: str) -> Callable[[Path], Deed]:
    """One node dies when it has done the last rename; the other finds that done."""

    def make(path: Path) -> Deed:
        whole = by_nodes(target)(path / "whole")
        names = [Path(op.to).name for op in whole.operations]
        root, named = path / "killed/root", target and f"{path}/killed/root/{target}"
        killed = by_nodes(target)(path / "killed", names.index("ckpt.pt" if target else "checkpoint-7") + 1)
        source = images_of_node(path / "source", NEW, 1)

        def act(directory: CheckpointDirectory) -> None:
            part = directory.contribute(PublishRequest(NEW, source, world_size=2), Share(1, 2, target=named))
            assert part.complete()

        return record(root, act, after=killed)

    return make


def _publish(path: Path, id: SaveId, target: str, kill_after: int | None = None, *, lower: bool = False) -> Deed:
    source = images(path / "source", id)

    def act(directory: CheckpointDirectory) -> None:
        with lower_layer(directory.path) if lower else nullcontext():
            directory.publish(PublishRequest(id, source, target=target))

    return record(path / "root", act, kill_after=kill_after)


def _forget_sources(path: Path) -> None:
    for source in (path / "root").glob("image-*"):
        shutil.rmtree(source)


MAKERS = {scene: publishing(scene) for scene in SCENES} | {
    "nodes": by_nodes(""),
    "nodes_with_target": by_nodes(USER),
    "nodes_with_directory": by_nodes(BEST),
    "lower_another_history": publishing("another_history", lower=True),
}
DEEDS = MAKERS | {
    "first": first(""),
    "first_with_target": first("user/user/ckpt.pt"),
    "nodes_in_turn": by_nodes_in_turn(""),
    "nodes_in_turn_with_target": by_nodes_in_turn(USER),
    "delete": deleting(""),
    "delete_with_target": deleting("dir/user/ckpt.pt"),
    "delete_with_target_within": deleting(WITHIN),
    "delete_directory": deleting(BEST),
    **{f"lower_{s}": publishing(s, lower=True) for s in ("strangers_directory", "target_overwritten", "target_again")},
    "delete_lower": deleting("", lower=True),
    "delete_lower_with_target": deleting("dir/user/ckpt.pt", lower=True),
    "delete_lower_directory": deleting(BEST, lower=True),
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """What is incomplete was left an hour ago, so that a sweep takes it away; the same bytes are parsed once."""
    monkeypatch.setattr(part_files, "ABANDONED", -1.0)
    monkeypatch.setattr(Manifest, "from_json", cache(Manifest.from_json))  # a third of the time of a check


def check(deed: Deed, limit: int, since: int = 0) -> int:
    """Read all disks that are tried; returns how many that were."""
    disks = 0
    for tree, over in deed.crashes(limit, since):
        deed.check(tree, over=over)
        disks += 1
    return disks


@pytest.mark.parametrize("name", DEEDS)
def test_power_lost_at_any_operation_leaves_old_or_new(fast_path, name):
    assert check(DEEDS[name](fast_path), LIMIT) > 11


NEEDED = {
    "root: + dir": "first",
    "user: + user": "first_with_target",
    "root: + user": "new_target",
    "tmp-*/model.pt": "default",
    "tmp-*/rank_N.pt": "default",
    "tmp-*/manifest.json": "default",
    "tmp-*: + manifest.json": "default",
    "tmp-*: + sub": "target_within",
    "sub: + mine.pt": "target_within",
    "dir: checkpoint-N -> checkpoint-N.aside-*": "strangers_directory",
    "dir: tmp-* -> checkpoint-N": "tracker_in_trouble",
    "user: .fastckpt-* -> ckpt.pt": "new_target",
    "dir/latest_checkpointed_iteration.txt": "default",
    "dir: tmp-* -> latest_checkpointed_iteration.txt": "default",
    "files/model.pt": "nodes",
    "files/rank_N.pt": "nodes",
    "files/manifest.json": "nodes",
    "files: tmp-* -> manifest.json": "nodes",
    "dir: files -> checkpoint-N": "nodes_in_turn",
    ".fastckpt: retired-* -> dropped-*": "another_history",
    "dir: checkpoint-N -> retired-*": "delete",
    ".fastckpt: retired-* -> deleted-*": "delete_with_target",
    "user: - ckpt.pt": "delete_with_target",
    "tmp-*: + rank_N.pt": "lower_another_history",
    "tmp-*: + theirs": "lower_strangers_directory",
    "dir: tmp-* -> checkpoint-N.aside-*": "lower_strangers_directory",
    "checkpoint-N: manifest.json -> manifest.json.dropped": "lower_another_history",
    "checkpoint-N: - rank_N.pt": "lower_another_history",
    "checkpoint-N: manifest.json -> manifest.json.deleted": "delete_lower_with_target",
}
"""Each sync, by its file or by its directory and the change that it makes durable: a deed that fails without it."""


FEW = ["tmp-*/model.pt", "dir: tmp-* -> checkpoint-N", ".fastckpt: retired-* -> dropped-*", "files/manifest.json"]
"""Purposes of which each run shows that the table is right; the campaign does of all."""


@pytest.mark.parametrize("purpose", [*FEW, *(pytest.param(each, marks=pytest.mark.campaign) for each in NEEDED)])
def test_without_any_one_sync_a_power_loss_loses_a_checkpoint(fast_path, purpose):
    deed = DEEDS[NEEDED[purpose]](fast_path)
    index = purposes(deed).index(purpose)
    crippled = replace(deed, operations=deed.operations[:index] + deed.operations[index + 1 :])
    with pytest.raises((AssertionError, FastckptError)):
        check(crippled, LIMIT, since=index)


def test_every_sync_is_listed_in_the_table(fast_path):
    """One that is in no deed of the table is new, and must show that it is needed, or is not."""
    found = {purpose for name, make in DEEDS.items() for purpose in purposes(make(fast_path / name))}
    assert found == set(NEEDED) | {
        "",
        "tmp-*/empty",  # has no bytes
        "files/empty-N",
        "dir: + .fastckpt",  # records of histories lie there, of which a deed has none
        ".fastckpt/tmp-*",  # a tracker that did not get its name
        "dir: tmp-* -> ckpt.pt",  # the tracker's sync comes before anything is removed
        ".fastckpt: checkpoint-N -> retired-*",  # its old name's absence is durable when the new one's presence is
        "parts-N-N-*/part-N.json",  # lets another machine read it
        "tmp-*/theirs",  # its bytes are nothing to compare with
        ".fastckpt: tmp-* -> retired-*",  # the next sync is that of the same directory, before the old one is touched
        "checkpoint-N: - theirs",  # it was never a checkpoint
    }


SWEPT = ["another_history", "target_overwritten", "nodes", "lower_another_history"]
"""Makers of which each run tries what a sweep finds; the campaign tries all."""


@pytest.mark.parametrize(
    "name", [*SWEPT, *(pytest.param(n, marks=pytest.mark.campaign) for n in MAKERS if n not in SWEPT)]
)
def test_power_lost_in_the_sweep_after_a_killed_writer_leaves_old_or_new(fast_path, name):
    """What a sweep finds was read from the page cache, and may not be on the disk."""
    make = MAKERS[name]
    renames = [n for n, op in enumerate(make(fast_path / "whole").operations, 1) if op.kind == "rename"]
    for count in renames[-4:]:
        path = fast_path / str(count)
        killed = make(path, kill_after=count)
        check(record(path / "root", CheckpointDirectory.sweep, after=killed), LIMIT)


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("target", ["", "user/ckpt.pt"])
def test_power_lost_during_a_quarantine_keeps_the_bad_checkpoint_and_its_reason(fast_path, target, lower):
    """It is where it was, or aside with the reason: what exists and is bad must not look like nothing."""
    root = fast_path / "root"
    directory = CheckpointDirectory(root / "dir")
    publish(directory, OLDEST)
    publish(directory, OLD, target and str(root / target))
    [stored] = [stored for stored in directory.checkpoints() if stored.id == OLD]
    stored.path_of("rank_0.pt").write_bytes(b"short")
    [(bad, _)] = directory.scan().damaged

    def act(directory: CheckpointDirectory) -> None:
        with lower_layer(root) if lower else nullcontext():
            directory.quarantine(bad, "short")

    deed = record(root, act, sound=False)
    for tree, over in deed.crashes(LIMIT):
        restore(tree, root)
        for _ in range(2):
            scan = deed.directory.scan()
            assert [stored.id for stored in scan.places] == [OLDEST]
            assert [why for _, why in scan.quarantined] in ([["short"]] if over else [["short"], []])
            assert scan.quarantined or [path for path, _ in scan.damaged] == [bad]
            assert [path.read_bytes() for path in root.rglob("rank_0.pt")].count(b"short") > 0
            deed.directory.sweep()


@pytest.mark.campaign
@pytest.mark.parametrize("name", DEEDS)
def test_power_lost_on_the_disk_of_any_node_leaves_old_or_new(fast_path, name):
    print(name, check(DEEDS[name](fast_path), 10**6), "disks")
