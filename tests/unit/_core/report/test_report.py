"""Attribution of the time of a job to its causes, as tables of events and results."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._core.report import goodput as g
from fastckpt._core.report import goodput_meter
from fastckpt._core.report.events import parsed
from fastckpt._core.report.goodput_meter import GoodputMeter
from fastckpt._core.report.report import Report, incidents, report
from fastckpt_run.views import report_text
from tests.unit._core.report.stories import Story


def started(**options) -> Story:
    """The workers train from second 10 on."""
    return Story(**options).starts(met=1, started=2, imported=5, joined=8).loads(10, seconds=1)


def seconds(found: Report) -> dict[str, float]:
    return {cause: spent / 1e9 for cause, spent in found.lost.items() if spent}


START = {"rendezvous": 1, "start": 1, "imports": 3, "setup": 4, "resume": 1}
JOINED = {"rendezvous": 1, "start": 1, "imports": 3, "setup": 3}


@dataclass
class Course:
    """A job, what its time went into, all of it or among others, its new and its repeated steps, its failures."""

    story: Callable[[], Story]
    whole: dict[str, float] = field(default_factory=dict)
    among: dict[str, float] = field(default_factory=dict)
    steps: tuple[int, int] | None = None
    kinds: tuple[str, ...] = ()


def told_in_a_load() -> Story:
    story = started().trains(30, 20).dies(30).stops(30).starts(met=31, started=31, imported=31, joined=32)
    story._origin = 0
    return story.trains(33, 0).loads(35, 1, step=18).trains(45, 10).finishes(45, 45)


def hung() -> Story:
    story = started().trains(25, 15, beat=25).trains(100, 15, beat=25)
    story.at(100, "hang", culprits=[1], silent=75.0, reason="", ranks=[]).trains(101, 15, beat=25).stops(101)
    return story.starts(102, 103, 104, 105).loads(106, 1, step=15).trains(116, 10).finishes(116, 116)


def killed_twice() -> Story:
    story = failed(started().trains(20, 10, stalled=1)).trains(40, 5).trains(45, 10)
    return story.dies(46).stops(46).starts(47, 48, 49, 50).loads(51, 1, 20).finishes(52, 53)


COURSES = {
    "a job that is killed twice": Course(killed_twice, kinds=("died", "died")),
    "a job that fails": Course(
        lambda: started().trains(30, 20).dies(31).stops(32).at(40, "job_ended", outcome="failed", seconds=40),
        kinds=("died",),
    ),
    "a job that loads nothing": Course(
        lambda: Story().starts(1, 2, 5, 8).trains(30, 20).finishes(31, 32), steps=(20, 0)
    ),
    "an uninterrupted job": Course(
        lambda: started().trains(30, 20, stalled=2, beat=29).finishes(31, 33),
        START | {"useful": 17, "stall": 2, "end": 4},
        steps=(20, 0),
    ),
    "a sample from before the load": Course(told_in_a_load, among={"repeated": 2}, steps=(28, 2), kinds=("died",)),
    "a hang": Course(hung, among={"detection": 75, "stop": 1, "useful": 25}, kinds=("hung",)),
    "workers stopped for another node": Course(
        lambda: started().trains(31, 20, beat=30).stops(32).starts(33, 34, 35, 36).loads(37, 1, step=20).trains(47, 10),
        among={"detection": 2},
        kinds=("elsewhere",),
    ),
    "a job that runs": Course(lambda: started().trains(20, 10), START | {"useful": 10}),
    "a job that never trained": Course(lambda: Story().starts(1, 2, 5, 8), JOINED),
    "the last flush of a job that a signal stops": Course(
        lambda: started().trains(20, 10, beat=20).at(25, "job_ended", outcome="stopped", seconds=25),
        START | {"useful": 10, "end": 5},
    ),
    "a script without a checkpointer": Course(
        lambda: Story().at(1, "rendezvous", node=0).at(2, "workers_started", pids={"0": 1}).finishes(30, 31),
        {"rendezvous": 1, "start": 1, "unexplained": 28, "end": 1},
    ),
    "an evaluation of a minute when all is trained": Course(
        lambda: started().trains(20, 10).trains(40, 15, beat=25).trains(85, 15, beat=25).finishes(86, 87),
        START | {"useful": 15, "end": 87 - 25},
    ),
    "a rollback within a process": Course(
        lambda: started().trains(20, 10).says(25, step=12, steps=15, named=15, loaded=7), steps=(12, 0)
    ),
    "the furthest rank, looked at in the middle of a save whose step another has named": Course(
        lambda: started().says(20, step=10, steps=10, named=10).says(25, step=5, steps=13, named=5), steps=(13, 0)
    ),
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


@pytest.mark.parametrize("course", COURSES.values(), ids=COURSES)
def test_a_report_attributes_time_steps_and_failures(course: Course):
    """And the measured time of the running launch grows up to that of the report."""
    story = course.story()
    found, measured = report([story.log]), follow(story)
    for (before, _), (now, age) in pairwise(measured):
        assert all(before[cause] <= now[cause] for cause in g.CAUSES), now
        assert sum(now.values()) <= age
    assert measured[-2] == (dict(found.lost), found.total)
    spent = seconds(found)
    assert not course.whole or spent == course.whole
    assert {cause: spent.get(cause) for cause in course.among} == course.among
    assert course.steps is None or (found.steps.new, found.steps.repeated) == course.steps
    assert tuple(one.kind for one in found.failures) == course.kinds
    trained = "useful" in spent
    assert found.goodput == (pytest.approx(spent["useful"] * 1e9 / found.total) if trained else None)


def failed(story: Story) -> Story:
    """It dies after 20 steps of a second, and goes on from step 15."""
    story.trains(30.5, 20, beat=30).dies(30.25).stops(31)
    story.lines.sort(key=lambda line: json.loads(line)["monotonic"])
    return story.starts(met=32, started=32.5, imported=33, joined=34).loads(35, 0.5, step=15)


def test_a_report_of_a_worker_death_counts_its_lost_time():
    story = failed(started()).at(35.75, "first_step", local_rank=0, at=5000 + 35.5)
    found = report([story.trains(45, 10).finishes(45, 46).log])
    assert seconds(found) == {
        "rendezvous": 1 + 1, "start": 1 + 0.5, "imports": 3 + 0.5, "setup": 4 + 1.5, "resume": 1 + 0.5,
        "useful": 20 + 5, "repeated": 5, "interrupted": 0.25, "stop": 0.75, "end": 1,
    }  # fmt: skip
    assert (found.steps.new, found.steps.repeated) == (25, 5)
    [failure] = found.failures
    assert (failure.kind, failure.rank, failure.exitcode, failure.repeated, failure.step) == ("died", 1, -9, 5, 15)
    after = [failure.stopped, failure.met, failure.started, failure.imported, failure.joined, failure.resumed]
    assert [round(at / 1e9, 6) for at in after] == [0.75, 1.75, 2.25, 2.75, 3.75, 4.75]
    assert (failure.first_step, failure.tier, failure.load) == (5_250_000_000, "memory", 500_000_000)


def test_a_report_of_two_launches_counts_steps_lost_by_the_agent_kill():
    """What was done since its last record is known from where the next one resumes."""
    first = started().trains(20, 10).at(28, "persisted", step=18, bytes=10, seconds=0.5)
    second = Story(pid=11, start=40)
    second.starts(met=41, started=42, imported=45, joined=48).loads(50, 1, step=18).trains(60, 10).finishes(60, 61)
    found = report([first.log, second.log])
    assert seconds(found)["down"] == 40 - 28
    assert seconds(found)["useful"] == 10 + 8 + 10 and found.steps.new == 28
    [failure] = found.failures
    assert (failure.kind, failure.tier, failure.step, failure.repeated) == ("agent", "memory", 18, 0)
    assert failure.relaunched == 12 * 10**9


@pytest.mark.parametrize("step", [-7200.0, 0.0, 7200.0])
def test_a_clock_change_between_launches_does_not_change_the_report(step: float):
    """In one boot of a host the monotonic clock counts; after another boot there is only the wall clock."""
    first, second = started().trains(20, 10), Story(pid=11, start=40, step=step)
    assert seconds(report([first.log, second.log]))["down"] == 20
    reborn = Story(pid=11, start=40, step=step, boot="another")
    assert seconds(report([first.log, reborn.log])).get("down", 0) == max(0, 20 + step)


def test_time_as_a_spare_is_no_rendezvous():
    story = Story().at(1, "waits_as_spare", host="host0", nodes=2).starts(101, 102, 105, 108).trains(118, 10)
    assert seconds(report([story.log])) == JOINED | {"spare": 100, "useful": 10}
    left_out = started().trains(20, 10).dies(20).stops(21).at(22, "waits_as_spare", host="host0", nodes=2)
    found = seconds(report([left_out.at(23, "waits_as_spare", host="host0", nodes=2).starts(52, 53, 54, 55).log]))
    assert found["spare"] == 30 and found["rendezvous"] == START["rendezvous"] + 1


def test_one_incident_on_several_nodes_is_reported_once():
    stories = [started(node=node, pid=10 + node).trains(30, 20) for node in (0, 1)]
    stories[0].dies(30).stops(31), stories[1].stops(30.5)
    for story in stories:
        story.starts(32, 33, 34, 35).loads(36, 1, step=20).at(38, "first_step", local_rank=0, at=5037)
        story.trains(50, 12)
    stories[1].dies(50).stops(51)
    found = report([story.log for story in stories])
    kinds = [[(one.node, one.kind) for one in incident] for incident in incidents(found.failures)]
    assert kinds == [[(0, "died"), (1, "elsewhere")], [(1, "died")]]


def test_failures_are_counted_by_host_and_by_who_was_first_over_all_launches():
    """Host 1 fails first and takes host 0 along; then it hangs, and host 0 is stopped for it; it fails a check."""
    stories = [started(node=node, pid=10 + node).trains(30, 20) for node in (0, 1)]
    stories[1].dies(30)
    stories[0].dies(30.5)
    for story in stories:
        story.stops(31).starts(32, 33, 34, 35).loads(36, 1, step=20).at(38, "first_step", local_rank=0, at=5037)
    stories[1].at(60, "hang", culprits=[1], silent=20.0, reason="", ranks=[]).stops(61)
    stories[0].at(61, "workers_stopped", pids=[100])
    for story in stories:
        story.starts(62, 63, 64, 65).loads(66, 1, step=20).trains(70, 4)
    stories[1].at(71, "node_check", occasion="failure", host="host1", verdict="problem", bad=[])
    stories[0].at(71, "node_check", occasion="round", host="host0", verdict="ok", bad=[{"host": "host2", "node": 2}])
    stories[0].at(72, "node_check", occasion="start", host="host0", verdict="ok", bad="nonsense")
    found = report([story.log for story in stories]).hosts
    assert [(one.host, one.failures, one.first, one.checks) for one in found] == [
        ("host1", 2, 2, 1), ("host0", 1, 0, 0), ("host2", 0, 0, 1)
    ]  # fmt: skip


def test_a_report_of_nodes_whose_ranks_change_counts_steps_once():
    """Node 0 is gone, and node 1 goes on in its place: it has not repeated what it did at the same time."""
    gone, stays = started(pid=10).trains(30, 20), started(node=1, pid=11).trains(30, 20).stops(31)
    for step in range(20, 26):
        stays.at(10 + step, "persisted", step=step, bytes=70, seconds=0.5)
    stays.node = 0
    stays.starts(36, 37, 38, 39).loads(40, 1, step=20).trains(60, 20).finishes(60, 61)
    found = report([gone.log, stays.log])
    assert {node: [placed.launch.pid for placed in chain] for node, chain in found.nodes.items()} == {0: [10], 1: [11]}
    assert (found.steps.new, found.steps.repeated) == (40, 0) and seconds(found)["useful"] == 60
    comes = Story(node=1, pid=12, start=70, boot="boot-2").starts(71, 72, 73, 74)
    found = report([gone.log, stays.log, comes.log])
    assert [[placed.launch.pid for placed in chain] for chain in found.nodes.values()] == [[10], [11, 12]]


def often(restarts: int) -> Story:
    """Each attempt repeats 5 of its 15 steps; every third is stopped for another node."""
    story, step, now = started().trains(30, 20, stalled=2), 20, 31.0
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


# --- whatever a log says


DEEDS = ("starts", "loads", "trains", "dies", "hang", "elsewhere", "stops", "finishes")


@st.composite
def logs(draw) -> list:
    """Jobs in which anything happens at any time, told by one agent or several, with lines lost and clocks set."""
    found = []
    instants = st.floats(0, 200).map(lambda x: round(x, 3))
    for pid in range(draw(st.integers(1, 3))):
        node, step = draw(st.integers(0, 1)), draw(st.sampled_from([0.0, -3600.0, 50.0]))
        story = Story(node=node, pid=pid, start=draw(instants), step=step, boot=draw(st.sampled_from("ab")))
        for _ in range(draw(st.integers(0, 25))):
            deed = draw(st.sampled_from(DEEDS))
            at = sorted(draw(st.lists(instants, min_size=4, max_size=4)))
            number = draw(st.integers(0, 50))
            match deed:
                case "starts":
                    story.starts(*at)
                case "loads":
                    story.loads(at[0], at[1], step=number - 1)
                case "trains":
                    story.trains(at[1], number, stalled=at[2], beat=at[0])
                case "hang":
                    story.at(at[0], "hang", culprits=[number], silent=at[1])
                case "elsewhere":
                    awaited = {"rank": number, "host": draw(st.sampled_from(["", "b"]))}
                    story.at(at[0], "hang_elsewhere", awaited=awaited)
                case "finishes":
                    story.finishes(at[0], at[1])
                case _:
                    getattr(story, deed)(at[0])
        kept = [line for line in story.lines if draw(st.integers(0, 9))]
        found.append(parsed(Path("log"), kept))
    return found


@settings(max_examples=25, deadline=None)
@given(logs())
def test_causes_in_a_report_add_up_to_the_total_time(found):
    whole = report(found)
    assert set(whole.lost) == set(g.CAUSES) and all(spent >= 0 for spent in whole.lost.values())
    alone = 0
    for chain in whole.nodes.values():
        for placed in chain:
            spans, launch = placed.spent.spans, placed.launch
            assert [span.begin for span in spans] == [launch.begin, *(span.end for span in spans)][: len(spans)]
            assert all(sum(span.shares.values()) == span.end - span.begin for span in spans)
            assert all(part >= 0 for span in spans for part in span.shares.values())
            assert sum(placed.spent.by_cause().values()) == launch.end - launch.begin
            alone += launch.end - launch.begin
    assert whole.total == alone + whole.lost["down"]
    assert whole.goodput is None or 0 <= whole.goodput <= 1


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
)
FIELDS = st.sampled_from(
    [
        *("time", "monotonic", "pid", "local_rank", "pids", "ranks", "seconds", "step", "beat", "steps", "stalled"),
        *("at", "imported", "culprits", "silent", "exitcode", "rank", "node", "tier", "outcome", "boot", "event"),
    ]
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), FIELDS, VALUES), max_size=12), st.integers(0, 2**32))
def test_invalid_events_in_a_log_do_not_fail_the_report(changes, seed):
    lines = failed(started()).trains(45, 10).finishes(45, 46).lines
    for at, name, value in changes:
        event = json.loads(lines[at % len(lines)])
        inner = event["ranks"] if name in ("beat", "steps", "stalled", "step") and event.get("ranks") else [event]
        if isinstance(inner, list) and isinstance(inner[0], dict):
            inner[0][name] = value
        lines[at % len(lines)] = json.dumps(event).encode()
    random.Random(seed).shuffle(lines)
    torn = lines[-1][: seed % max(1, len(lines[-1]))]
    found = report([parsed(Path("log"), [*lines[:-1], torn, b"[1]", b"\xff", b'{"event": 1}'])])
    assert sum(found.lost.values()) == found.total and found.unreadable >= 3


def test_a_report_names_slow_ranks_and_how_long_they_were_slow():
    story = started()
    for second, rank, slow in ((12, 1, True), (13, 0, True), (15, 1, False), (16, 1, False), (18, 0, True)):
        facts = {"host": "a", "part": "data", "cost": 0.18, "own": 1.0, "others": 0.8, "window": second}
        story.at(second, "straggler", rank=rank, slow=slow, **facts)
    story.at(19, "straggler", rank="x", slow=True).at(20, "straggler", rank=2, slow=True, cost="much")
    found = report([story.trains(30, 20).stops(31).log])
    begin = next(iter(found.nodes.values()))[0].begin
    assert [(one.rank, (one.begin - begin) // 10**9, one.end and (one.end - begin) // 10**9) for one in found.slow] == [
        (1, 12, 15), (0, 13, 31), (2, 20, 31)
    ]  # fmt: skip
    assert (found.slow[0].host, found.slow[0].part, found.slow[0].cost, found.slow[2].cost) == ("a", "data", 0.18, 0.0)
    assert "slow rank: a, rank 1, data: the job was 18% slower (found after 12 s, for 3 s)" in report_text.facts(found)
