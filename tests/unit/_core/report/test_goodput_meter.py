"""Goodput while a launch runs: at its end that of the report, and before it no cause ever loses time again."""

import json
from itertools import pairwise

import pytest

from fastckpt._core.report import goodput_meter
from fastckpt._core.report.goodput import CAUSES
from fastckpt._core.report.goodput_meter import GoodputMeter
from fastckpt._core.report.report import report
from tests.unit._core.report.stories import Story


def first() -> Story:
    return Story().starts(met=1, started=2, imported=5, joined=8)


def trained() -> Story:
    story = first().loads(10, 1)
    for step in range(1, 21):
        story.trains(10 + step, step, stalled=step / 10)
    return story


def killed() -> Story:
    story = trained().dies(30.5).trains(30.75, 20, stalled=2, beat=30.25).stops(31)
    return story.starts(32, 32.5, 33, 34).loads(35, 0.5, step=15).trains(40, 5).trains(45, 10)


def hung() -> Story:
    story = trained().trains(100, 20, beat=30, stalled=2)
    story.at(100, "hang", culprits=[1], silent=75.0, reason="", ranks=[]).trains(100.5, 20, beat=30, stalled=2)
    return story.stops(101).starts(102, 103, 104, 105).loads(106, 1, step=20).trains(116, 10)


STORIES = {
    "trained": lambda: trained().finishes(31, 33),
    "killed": lambda: killed().finishes(46, 47),
    "killed twice": lambda: killed().dies(46).stops(46).starts(47, 48, 49, 50).loads(51, 1, 20).finishes(52, 53),
    "hung": lambda: hung().finishes(116, 117),
    "elsewhere": lambda: trained().stops(32).starts(33, 34, 35, 36).loads(37, 1, 20).trains(47, 10).finishes(47, 48),
    "never joined": lambda: Story().at(1, "rendezvous", seconds=1, node=0).finishes(3, 4),
    "no load": lambda: first().trains(30, 20).finishes(31, 32),
    "stopped": lambda: trained().at(31, "job_ended", outcome="stopped", seconds=31),
    "failed": lambda: trained().dies(31).stops(32).at(40, "job_ended", outcome="failed", seconds=40),
}


def follow(story: Story) -> list[tuple[dict[str, int], int]]:
    """The time by cause, and the age, after each event and half a second later."""
    meter, found = GoodputMeter(), list[tuple[dict[str, int], int]]()
    for line in story.lines:
        event = json.loads(line)
        meter.follow(event)
        for later in (0, 500_000_000):
            measured = meter.measure(round(event["monotonic"] * 1e9) + later)
            found.append((dict(measured.by_cause), measured.age))
    return found


@pytest.mark.parametrize("name", STORIES)
def test_the_measured_time_grows_up_to_that_of_the_report(name: str):
    story = STORIES[name]()
    measured = follow(story)
    for (before, _), (now, age) in pairwise(measured):
        assert all(before[cause] <= now[cause] for cause in CAUSES), now
        assert sum(now.values()) <= age
    whole = report([story.log])
    assert measured[-2] == (dict(whole.lost), whole.total)


def often(restarts: int) -> Story:
    """Each attempt repeats 5 of its 15 steps; every third is stopped for another node."""
    story, step, now = trained(), 20, 31.0
    for number in range(restarts):
        story = story.stops(now) if number % 3 else story.dies(now).stops(now + 0.5)
        story = story.starts(now + 1, now + 2, now + 3, now + 4).loads(now + 5, 1, step=step - 5)
        step, now = step + 10, now + 20
        story.trains(now - 10, 5).trains(now, 15, stalled=0.5)
    return story.finishes(now, now + 1)


def test_rounds_of_long_ago_are_summed_up_and_the_time_is_that_of_the_report(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(goodput_meter, "KEPT", 4)
    story, meter, most = often(40), GoodputMeter(), 0
    for line in story.lines:
        meter.follow(json.loads(line))
        most = max(most, len(next(iter(meter._courses.values())).launch.rounds))
    measured, whole = meter.measure(round(json.loads(story.lines[-1])["monotonic"] * 1e9)), report([story.log])
    assert most <= 2 * goodput_meter.KEPT + 1
    assert (dict(measured.by_cause), measured.age) == (dict(whole.lost), whole.total)
    assert measured.steps == whole.steps and dict(measured.failures) == {"died": 14, "elsewhere": 26}
