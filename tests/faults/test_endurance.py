"""Very many saves in one job, in the midst of which the clock is set forward and back by an hour."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.storage.local.directory import CheckpointDirectory

PROGRAM = Path(__file__).with_name("endure.py")
MEGABYTE = 1 << 20


def endured(folder: Path, saves: int) -> list[list[dict[str, Any]]]:
    """What each rank wrote down, after a good end."""
    with (folder / "output").open("w") as output:
        done = subprocess.run(
            [sys.executable, str(PROGRAM), "--launch", "--out", str(folder), "--saves", str(saves)],
            cwd=folder, stdout=output, stderr=subprocess.STDOUT, timeout=1200, check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        )  # fmt: skip
    assert done.returncode == 0, (folder / "output").read_text()
    return [[json.loads(line) for line in (folder / f"endured.{rank}").read_text().splitlines()] for rank in (0, 1)]


def check_flat(lines: list[dict[str, Any]], who: str) -> None:
    """From the second tenth of the saves on, nothing grows; a persist that runs as it is looked at does not count."""
    early, late = (
        {what: min(line[who][what] for line in part) for what in part[0][who]} for part in (lines[1:4], lines[-3:])
    )
    assert late["descriptors"] <= early["descriptors"] + 2, (early, late)
    assert late["mappings"] <= early["mappings"] + 20, (early, late)
    assert late["threads"] <= early["threads"] + 1, (early, late)
    assert late["memory"] <= early["memory"] + 20 * MEGABYTE, (early, late)


def check(folder: Path, saves: int) -> None:
    ranks = endured(folder, saves)
    kept = sorted(stored.id.step for stored in CheckpointDirectory(folder / "checkpoints").checkpoints())
    for *lines, end in ranks:
        print(f"{saves} saves, {lines[-1]['skipped']} skipped: {lines[1]} ... {lines[-1]}; {end}; kept {kept}")
        for who in ("own", "agent"):
            check_flat(lines, who)
        # two a save: begin and committed; three where an image was made or grew
        assert all(line["messages"] <= 2.1 * saves / 10 + 20 for line in lines), lines
        assert abs(lines[-1]["sent"] - lines[1]["sent"]) < 0.05 * lines[1]["sent"], lines
        assert lines[-1]["skipped"] < saves / 4
    newest = saves - len([1 for line in skips(folder) if line == saves])
    assert {lines[-1]["end"] for lines in ranks} == {newest}, "the newest is the newest, whatever the clock said then"
    assert ranks[0][-1]["tier"] == "memory"
    check_kept(kept, saves)


def skips(folder: Path) -> list[int]:
    events = map(json.loads, (folder / "events").read_text().splitlines())
    return [event["step"] for event in events if event["event"] == "skipped"]


def check_kept(kept: list[int], saves: int) -> None:
    """The first of every 30 minutes: one from the start, one each from when the clock was set, and the newest.

    And perhaps one from when the right time came to a new half hour, in each of these three parts.
    """
    starts = [0, 0.4 * saves, 0.7 * saves]
    for start, end in zip(starts, [*starts[1:], saves + 1], strict=True):
        part = [step for step in kept if start <= step < end]
        assert 1 <= len(part) <= 3, kept
        assert part[0] <= start + saves / 10, kept
    assert kept[-1] >= 0.9 * saves


def test_thousands_of_saves_with_clock_changes_grow_nothing(tmp_path: Path):
    check(tmp_path, 2000)


@pytest.mark.campaign
def test_ten_thousand_saves_with_clock_changes_grow_nothing(tmp_path: Path):
    check(tmp_path, 10_000)
