"""Power that is lost anywhere leaves the old or the new checkpoint whole, whatever was not synced by then.

Each deed is recorded once; all that a disk may hold after each of its operations is then made and read. Where that
is too much, a part of it is chosen, the same in every run; the campaign leaves nothing out.
"""

from collections.abc import Callable
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
    Deed,
    lower_layer,
    purposes,
    record,
)
from tests.unit._core.storage.disk import restore
from tests.unit._core.storage.recorder import Operation

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


def loses_without(deed: Deed, is_left_out: Callable[[int, Operation], object]) -> bool:
    """Whether some of its syncs are missed when power is lost."""
    left = [op for n, op in enumerate(deed.operations) if op.kind != "sync" or not is_left_out(n, op)]
    assert len(left) < len(deed.operations)
    try:
        replace(deed, operations=left).check_crashes(LIMIT)
    except (AssertionError, FastckptError):
        return True
    return False


@pytest.mark.parametrize(("name", "end"), [("default", "/model.pt"), ("default", "/dir"), ("nodes", "/model.pt")])
def test_without_syncs_a_power_loss_loses_a_checkpoint(fast_path, name, end):
    """Without those of the model's file alone, or of the directory alone that has the names."""
    assert loses_without(DEEDS[name](fast_path), lambda _, op: op.path.endswith(end))


@campaign
def test_no_sync_is_superfluous(fast_path):
    """Each is needed by one of the deeds, but for some of a few."""
    needed, others = set(), set()
    for name, make in DEEDS.items():
        deed = make(fast_path / name)
        for number, purpose in enumerate(purposes(deed)):
            if purpose and purpose not in needed:
                is_needed = loses_without(deed, lambda n, _, number=number: n == number)
                (needed if is_needed else others).add(purpose)
    assert others - needed <= {
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
