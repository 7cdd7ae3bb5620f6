"""Event logs of real jobs with real kills: the report agrees with the training's own log."""

import re
from operator import itemgetter

from fastckpt._core.report.events import find, read
from fastckpt._core.report.report import report
from tests.faults.jobs import Job
from tests.support.json_lines import whole_lines
from tests.unit._core.report.schema import faults, table

SAVES = ("--memory", "5", "--disk", "1000")


def is_noticed(job: Job, left: int) -> bool:
    """Whether an agent with so many restarts left has seen a death."""
    return any(event["event"] == "worker_died" and event["restarts_left"] == left for event in whole_lines(job.events))


def test_the_report_of_a_job_with_two_kills_equals_its_training_log(new_job):
    """Three steps after a save, then two; the log of the agent, that of --fast-events and the summary agree."""
    job: Job = new_job()
    job.start(*SAVES, "--wait-at", "13", "27", restarts=3)
    for step, victims, left in ((13, (1,), 3), (27, (0, 1), 2)):
        job.wait_for_all(step)
        job.kill_processes(*victims)
        job.until(lambda left=left: is_noticed(job, left), "the notice")
        job.go_on(step)
    assert job.wait() == 0, job.text()
    found = report([read(path) for path in find(str(job.checkpoint_dir))])
    assert sum(found.lost.values()) == found.total and not found.unreadable
    assert [(one.step, one.tier) for one in found.failures] == job.resumes()[1:]
    assert [one.repeated for one in found.failures] == [steps for steps, _ in job.repeated()]
    assert (found.steps.new, found.steps.repeated) == (60, 5)
    assert found.goodput is not None and 0 < found.goodput < 1
    for one in found.failures:
        instants = [one.met, one.started, one.joined, one.resumed, one.first_step]
        assert None not in instants and instants == sorted(instants)
    assert [(one.kind, one.exitcode, one.repeated) for one in found.failures] == [("died", -9, 3), ("died", -9, 2)]
    assert found.failures[0].rank == 1
    assert found.counts.saves == 12 and not found.counts.skipped
    told = [event["text"] for event in whole_lines(job.events) if event["event"] == "restarted"]
    lines = [line for line in job.text().splitlines() if "restarts left" in line]
    assert lines == [f"fastckpt-run: {text} (FC-030, docs/errors.md#fc-030)" for text in told]
    rest = r"step 10 from memory after \d+\.\d s, 3 steps repeated, 2 of 3 restarts left"
    assert re.fullmatch(rf"rank 1 died: SIGKILL; resumed {rest}", told[0])
    assert re.fullmatch(r"rank . died: .*; resumed step 25 .* 2 steps repeated, 1 of 3 restarts left", told[1])
    assert [(one.restarts_left, one.restarts) for one in found.failures] == [(2, 3), (1, 3)]
    assert f"{found.steps.new} steps done, 5 repeated, 2 restarts, goodput " in job.text()
    [path] = find(str(job.checkpoint_dir))
    own = whole_lines(path)
    assert not [fault for event in [*own, *whole_lines(job.events)] for fault in faults(event)]
    by_time = itemgetter("monotonic")  # threads do not wait for each other between one file and the other
    others = [event for event in whole_lines(job.events) if event["event"] != "saved"]
    assert sorted(others, key=by_time) == sorted(own, key=by_time)
    assert report([read(job.events)]).lost == found.lost
    assert {event["event"] for event in own} <= table().keys()
    [launch] = found.nodes[0]
    assert launch.launch.outcome == "succeeded" and len(launch.launch.rounds) == 3
    assert found.lost["unexplained"] == 0 == found.lost["down"]
