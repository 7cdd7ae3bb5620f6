"""Looks at a directory of many checkpoints and other files: what they cost, and that nothing changed is passed over."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import NAME
from fastckpt._core.policy.retention import KeepAny, KeepBest, KeepLast
from fastckpt._core.retention import Deletion, retire
from fastckpt._core.storage.local import scan
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import ConfigError
from tests.support.counting_calls import FileCalls
from tests.unit._core.storage.checkpoints import ids, publish


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Of the checkpoints here the newest four are looked at each time."""
    monkeypatch.setattr(scan, "LOOKED_AT", 4)


def fill(directory: CheckpointDirectory, count: int) -> None:
    """Have checkpoints of steps 1 to ``count``."""
    for step in range(1, count + 1):
        publish(directory, SaveId(0, step))


def steps(directory: CheckpointDirectory) -> list[int]:
    return [stored.id.step for stored in directory.known()]


@pytest.mark.parametrize("target", ["", "{dir}/model-{step}.pt"])
def test_a_persist_makes_as_many_calls_with_12_kept_as_with_6(directory, target):
    """Beside as many files of others."""

    def made(count: int) -> int:
        fill(directory, count)
        for number in range(10 * count):
            (directory.path / f"events.{number}").touch()
        for step in (count + 1, count + 2):  # what was there before is found once
            counted = FileCalls(directory.path)
            publish(directory, SaveId(0, step), target.format(dir=directory.path, step=step))
            retire(directory, KeepLast(count), lambda: None)
            counted.stop()
        return counted.made.total()

    few = made(6)
    shutil.rmtree(directory.path)
    assert made(12) == few


def test_a_checkpoint_takes_the_path_of_one_that_another_process_saved_or_that_is_damaged(directory):
    path = str(directory.path / "model.pt")
    publish(directory, SaveId(0, 1), path)
    publish(CheckpointDirectory(directory.path), SaveId(0, 2), path)
    publish(directory, SaveId(0, 3), path)
    assert [stored.id.step for stored in directory.scan().places] == [3] and not directory.scan().stale
    (directory.path / "checkpoint-3" / "rank_0.pt").unlink()
    publish(directory, SaveId(0, 4), path)
    found = directory.scan()
    assert [stored.id.step for stored in found.places] == [4] and len(found.quarantined) == 1 and not found.damaged


FAULTS: dict[str, Callable[[Path], object]] = {
    "a file is gone": lambda place: (place / "model.pt").unlink(),
    "a file is shorter": lambda place: os.truncate(place / "model.pt", 5),
    "the manifest is gone": lambda place: (place / NAME).unlink(),
    "the manifest is damaged": lambda place: (place / NAME).write_text((place / NAME).read_text().replace("0", "1")),
    "it has another name": lambda place: place.rename(place.with_name(f"moved-{place.name}")),
    "a copy of another took its place": lambda place: (
        shutil.rmtree(place),
        shutil.copytree(place.with_name("checkpoint-1"), place),
    ),
}
"""What may happen to a checkpoint that was whole when it was looked at."""
MANY = 8


@pytest.mark.parametrize("happens", FAULTS)
def test_the_newest_that_is_bad_now_protects_no_other_and_is_not_counted(directory, happens):
    fill(directory, 4)
    assert steps(directory) == [4, 3, 2, 1]
    FAULTS[happens](directory.path / "checkpoint-4")
    FAULTS[happens](directory.path / "checkpoint-2")
    assert steps(directory) == [3, 1]
    retire(directory, KeepLast(2), lambda: None)
    assert [stored.id.step for stored in directory.checkpoints()] == [3, 1]
    FAULTS[happens](directory.path / "checkpoint-3")
    with pytest.raises(ConfigError, match="it is the newest of 1 whole"):
        directory.delete(SaveId(0, 1))
    retire(directory, KeepLast(1), lambda: None)
    assert steps(directory) == [1]


@pytest.mark.parametrize("happens", ["a file is shorter", "a copy of another took its place"])
def test_the_next_best_is_kept_where_the_best_is_bad_now(directory, happens):
    """The best is older than those that are looked at each time, and what is worse and as old is to go."""
    for step in range(1, MANY + 1):
        publish(directory, SaveId(0, step), metrics={"loss": {2: 0.1, 3: 0.2}.get(step, 1.0)})
    assert len(steps(directory)) == MANY
    FAULTS[happens](directory.path / "checkpoint-2")
    retire(directory, KeepAny((KeepLast(2), KeepBest(1, "loss"))), lambda: None)
    assert [stored.id.step for stored in directory.checkpoints()] == [MANY, MANY - 1, 3]


def test_a_scan_finds_old_ones_bad_and_the_last_whole_one_stays(directory):
    """Also if all are bad of which the newest are looked at each time."""
    fill(directory, MANY)
    found = [*range(MANY, 0, -1)]
    assert [stored.id.step for stored in directory.scan().whole] == steps(directory) == found
    for step, happens in enumerate(FAULTS, 2):
        FAULTS[happens](directory.path / f"checkpoint-{step}")
        found.remove(step)
        assert [stored.id.step for stored in directory.scan().whole] == found, happens
        assert step not in steps(directory)
    known = CheckpointDirectory(directory.path)
    assert steps(known) == [MANY, 1]
    FAULTS["a copy of another took its place"](directory.path / f"checkpoint-{MANY}")
    with pytest.raises(ConfigError, match="it is the newest of 1 whole"):
        known.delete(SaveId(0, 1))
    assert [stored.id.step for stored in CheckpointDirectory(directory.path).checkpoints()] == [1]


def test_what_another_process_publishes_and_deletes_is_seen(directory, fast_path):
    fill(directory, 3)
    other = CheckpointDirectory(directory.path)
    assert steps(directory) == [3, 2, 1]
    publish(other, SaveId(0, 4))
    other.delete(SaveId(0, 2))
    assert steps(directory) == [4, 3, 1]
    publish(other, SaveId(1, 3))  # of a newer history, in the same place
    assert [stored.id for stored in directory.known()] == [SaveId(1, 3), SaveId(0, 4), SaveId(0, 1)]
    # A file system may give a new directory the inode of one that was removed.
    fresh = CheckpointDirectory(fast_path / "other")
    publish(fresh, SaveId(2, 4))
    shutil.copytree(fresh.path / "checkpoint-4", directory.path / "checkpoint-4", dirs_exist_ok=True)
    (directory.path / "checkpoint-4" / NAME).unlink()
    (fresh.path / "checkpoint-4" / NAME).rename(directory.path / "checkpoint-4" / NAME)
    assert [stored.id for stored in directory.known()] == [SaveId(2, 4), SaveId(1, 3), SaveId(0, 1)]


def test_a_checkpoint_is_found_when_it_is_copied_whole_and_behind_a_link_that_leads_to_one(directory, fast_path):
    fill(directory, 2)
    assert steps(directory) == [2, 1]
    (directory.path / "checkpoint-1" / "model.pt").rename(directory.path / "other")
    assert [stored.id.step for stored in directory.scan().whole] == steps(directory) == [2]
    (directory.path / "other").rename(directory.path / "checkpoint-1" / "model.pt")
    assert steps(directory) == [2, 1]
    (directory.path / "checkpoint-1").rename(fast_path / "elsewhere")
    (directory.path / "checkpoint-1").symlink_to(fast_path / "elsewhere")
    (directory.path / "checkpoint-7").symlink_to(fast_path / "nowhere")
    assert steps(directory) == [2, 1] == [stored.id.step for stored in directory.checkpoints()]


def test_a_strategy_deletes_a_checkpoint_by_each_of_its_names_and_nothing_else(directory, fast_path, caplog):
    (fast_path / "link").symlink_to(directory.path)
    for step in range(1, 7):
        publish(directory, SaveId(0, step), str(directory.path / "five.pt") if step == 5 else "")
    names = ["dir/checkpoint-1", "dir/checkpoint-2/", "dir/3", "dir/./x/../checkpoint-4", "link/five.pt"]
    for count, path in enumerate(names, 1):
        Deletion(directory)(f"{fast_path}/{path}")
        assert [id.step for id in ids(directory)] == [*range(6, count, -1)]
    publish(directory, SaveId(0, 7))
    (directory.path / "runs").mkdir()
    for path in ("runs", "nothing", ".fastckpt", ".fastckpt/writers", "checkpoint-6/model.pt", "8"):
        caplog.clear()
        Deletion(directory)(str(directory.path / path))
        assert "not deleted" in caplog.text
    (fast_path / "other").mkdir()
    (directory.path / "link").symlink_to(fast_path / "other")
    for path in ("", "..", "../other", "/etc/passwd", "link"):
        with pytest.raises(ConfigError, match="only checkpoints inside"):
            Deletion(directory)(str(directory.path / path))
    assert [id.step for id in ids(directory)] == [7, 6]
    assert (directory.path / "runs").is_dir() and (fast_path / "other").is_dir()
