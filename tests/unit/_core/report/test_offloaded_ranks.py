"""Ranks that offload, as read from event logs."""

from typing import Any

from fastckpt._core.report.offloaded_ranks import OffloadedRank, OffloadEnd
from fastckpt._core.report.report import report
from fastckpt_run.views import report_text
from fastckpt_run.views.page import page
from tests.unit._core.report.stories import WALL, Story

MIB = 1 << 20


def plan(story: Story, at: float, rank: Any = 0, **fields: Any) -> Story:
    told: dict[str, Any] = {"directory": "/nvme", "worker": 100 + rank, "number": 1, "profiled": 1}
    told |= {"saved": 10 * MIB, "offloaded": 8 * MIB, "kept": 2 * MIB, "compressed": 0, "written": 8 * MIB}
    return story.at(at, "offload_planned", **{"rank": rank, "budget": 4 * MIB, "predicted_wait": 0.25} | told | fields)


def came(story: Story, at: float, rank: Any = 0, steps: Any = 2, wait: float = 0.5, **fields: Any) -> Story:
    told: dict[str, Any] = {"directory": "/nvme", "worker": 100 + rank, "number": 1, "forwards": steps + 1}
    told |= {"written": (steps + 1) * 9 * MIB, "read": steps * 9 * MIB, "waited_for_writes": 1.0}
    told |= {"waited_for_reads": 2.0, "steps": steps, "planned_written": steps * 8 * MIB}
    told |= {"step_written": steps * 9 * MIB, "predicted_wait": steps * 0.25, "step_wait": steps * wait}
    return story.at(at, "offload_measured", **{"rank": rank} | told | fields)


def begun() -> Story:
    return Story().starts(1, 2, 3, 4).loads(5, 1).trains(6, 10)


def test_steps_of_a_rank_are_compared_with_their_plan_by_its_last_report():
    story = came(came(plan(begun(), 7), 8, steps=1, wait=9.0), 9, steps=4)
    [one] = report([story.log]).offloaded
    bytes_of = {"budget": 4 * MIB, "saved": 10 * MIB, "kept": 2 * MIB, "written": 45 * MIB, "read": 36 * MIB}
    waits = {"waited_for_writes": 10**9, "waited_for_reads": 2 * 10**9}
    of_steps = {"planned_written": 8 * MIB, "step_written": 9 * MIB, "predicted_wait": 250_000_000}
    steps = {"forwards": 5, "steps": 4, "step_wait": 500_000_000}
    assert one == OffloadedRank(node=0, rank=0, directory="/nvme", **bytes_of, **waits, **of_steps, **steps)


def test_processes_and_offloaders_of_a_rank_add_up_and_ranks_of_nodes_do_not():
    one = came(came(came(begun(), 7, steps=2), 8, steps=3, number=2), 9, steps=5, worker=300)
    other = came(Story(node=1, pid=11).starts(1, 2, 3, 4).loads(5, 1).trains(6, 10), 7, rank=2, steps=1)
    found = report([one.log, other.log]).offloaded
    assert [(each.node, each.rank, each.steps, each.forwards) for each in found] == [(0, 0, 10, 13), (1, 2, 1, 2)]


def test_ends_have_their_time_cause_and_remedy():
    story = plan(begun(), 7, rank=1)
    told = {"worker": 101, "number": 1, "directory": "/nvme", "error": "no space", "remedy": "Free some"}
    found = report([story.at(8, "offload_ended", rank=1, **told).log])
    assert found.offloaded[0].ends == [OffloadEnd(round((WALL + 8) * 1e9), "/nvme", "no space", "Free some")]
    assert "offloading of rank 1 ended after 8 s: /nvme: no space. Free some" in report_text.facts(found)
    assert "Offloaded activations" in page(found, "run")
