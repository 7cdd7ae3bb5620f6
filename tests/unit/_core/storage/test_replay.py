"""Power that is lost anywhere leaves the old or the new checkpoint whole, whatever was not synced by then.

Each deed is recorded once; all that a disk may hold after each of its operations is then made and read. Where that
is too much, a part of it is chosen, the same in every run; the campaign leaves nothing out.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest

from fastckpt._core.format.manifest import Manifest
from fastckpt._core.storage.local import part_files
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import FastckptError
from tests.unit._core.storage.checkpoints import publish
from tests.unit._core.storage.deeds import (
    DEEDS,
    OLD,
    OLDEST,
    PUBLICATIONS,
    SCENES,
    USER,
    lower_layer,
    purposes,
    record,
)
from tests.unit._core.storage.disk import restore

LIMIT = 4
"""Disks that are tried after one operation, beside those of a journal that keeps order, if there are more."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """What is incomplete was left an hour ago, so that a sweep takes it away; the same bytes are parsed once."""
    monkeypatch.setattr(part_files, "ABANDONED", -1.0)
    monkeypatch.setattr(Manifest, "from_json", cache(Manifest.from_json))  # a third of the time of a check


@pytest.mark.parametrize("name", DEEDS)
def test_power_lost_at_any_operation_leaves_old_or_new(fast_path, name):
    assert DEEDS[name](fast_path).check_crashes(LIMIT) > 9


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
    "checkpoint-N: manifest.json -> manifest.json.deleted": "lower_delete_with_target",
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
        crippled.check_crashes(LIMIT, since=index)


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
"""Publications of which each run tries what a sweep finds; the campaign tries all."""


@pytest.mark.parametrize(
    "name", [*SWEPT, *(pytest.param(n, marks=pytest.mark.campaign) for n in PUBLICATIONS if n not in SWEPT)]
)
def test_power_lost_in_the_sweep_after_a_killed_writer_leaves_old_or_new(fast_path, name):
    """What a sweep finds was read from the page cache, and may not be on the disk."""
    renames = [n for n, op in enumerate(SCENES[name].record(fast_path / "whole").operations, 1) if op.kind == "rename"]
    for count in renames[-4:]:
        killed = SCENES[name].record(fast_path / str(count), kill_after=count)
        record(killed.root, CheckpointDirectory.sweep, after=killed).check_crashes(LIMIT)


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("target", ["", USER])
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
    print(name, DEEDS[name](fast_path).check_crashes(10**6), "disks")
