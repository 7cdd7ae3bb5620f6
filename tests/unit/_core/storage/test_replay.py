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


SELDOM = ["again", "target_again", "new_directory", "delete_directory", "delete_with_target_within"]
SELDOM += ["nodes_with_directory", "nodes_with_target", "nodes_in_turn_with_target"]
SELDOM += [f"lower_{name}" for name in ("target_overwritten", "target_again", "delete", "delete_directory")]
"""Deeds whose file operations and syncs are all among those of the others, in another order; the campaign tries all."""
campaign = pytest.mark.campaign


@pytest.mark.parametrize(
    ("name", "limit"),
    [(name, LIMIT) for name in DEEDS if name not in SELDOM] + [pytest.param(n, 10**6, marks=campaign) for n in DEEDS],
)
def test_power_lost_at_any_operation_leaves_old_or_new(fast_path, name, limit):
    assert DEEDS[name](fast_path).check_crashes(limit) > 9


@pytest.mark.parametrize(("name", "end"), [("default", "/model.pt"), ("default", "/dir"), ("nodes", "/model.pt")])
def test_without_syncs_a_power_loss_loses_a_checkpoint(fast_path, name, end):
    """Without those of the model's file alone, or of the directory alone that has the names."""
    deed = DEEDS[name](fast_path)
    left = [op for op in deed.operations if op.kind != "sync" or not op.path.endswith(end)]
    assert len(left) < len(deed.operations)
    with pytest.raises((AssertionError, FastckptError)):
        replace(deed, operations=left).check_crashes(LIMIT)


SWEPT = ["another_history", "target_overwritten", "nodes", "lower_another_history"]
"""Publications of which each run tries what a sweep finds; the campaign tries all."""


@pytest.mark.parametrize("name", SWEPT + [pytest.param(n, marks=campaign) for n in PUBLICATIONS if n not in SWEPT])
def test_power_lost_in_the_sweep_after_a_killed_writer_leaves_old_or_new(fast_path, name):
    """What a sweep finds was read from the page cache, and may not be on the disk."""
    renames = [n for n, op in enumerate(SCENES[name].record(fast_path / "whole").operations, 1) if op.kind == "rename"]
    for count in renames[-3:]:
        killed = SCENES[name].record(fast_path / str(count), kill_after=count)
        record(killed.root, CheckpointDirectory.sweep, after=killed).check_crashes(LIMIT)


@pytest.mark.parametrize(("target", "lower"), [("", True), (USER, False)])
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
