"""Readings of event logs beside the time: decisions on the frequency, units of steps, costs, ranks that offload."""

import json
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.report.events import read
from fastckpt._core.report.measured_costs import measured_costs
from fastckpt._core.report.offloaded_ranks import OffloadedRank, OffloadEnd
from fastckpt._core.report.report import report
from fastckpt._core.report.step_unit import StepUnit, stretch
from fastckpt_run import formatting
from fastckpt_run.views import report_text
from fastckpt_run.views.page import page
from tests.unit._core.report.stories import WALL, Story

PROFILING = {"memory": None, "storage": None, "overhead": None, "bound": 0.035, "changed": False, "why": "profiling"}
CHOSEN = {"memory": 5, "storage": 10, "overhead": None, "bound": 0.035, "changed": True, "why": "chosen"}
KEPT = CHOSEN | {"overhead": 0.0312, "changed": False, "why": "as before"}
RARER = CHOSEN | {"memory": 10, "overhead": 0.07, "why": "the bound is broken"}
EVERY = "a snapshot every 5 steps, a persist every 10"
GIVEN = {"memory": 1, "storage": 1000, "overhead": None, "bound": None, "changed": True, "why": "given"}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ((PROFILING,), "none yet: what checkpoints cost is measured since step 0"),
        ((PROFILING, CHOSEN), EVERY),
        ((PROFILING, CHOSEN, KEPT), f"{EVERY}; checkpoints cost 3.12 % of training lately, of 3.50 % at most"),
        ((CHOSEN, KEPT, RARER, CHOSEN), f"{EVERY}; checkpoints cost 7.00 % of training lately, of 3.50 % at most"),
        ((GIVEN,), "a snapshot every 1 step, a persist every 1,000"),
    ],
)
def test_the_frequency_is_described_in_words(said: tuple[dict[str, Any], ...], expected: str):
    story = Story().starts(1, 2, 3, 4).loads(5, 1)
    for number, fields in enumerate(said):
        story.at(story.now + 10, "frequency", directory="/run", step=7 * number, **fields)
    assert formatting.frequency(report([story.log]).decisions) == expected


@pytest.mark.parametrize(
    ("last", "per_step", "reached", "number"),
    [
        pytest.param(Telemetry(step=13, steps=13, named=13), 1, 13, 13, id="the script names each step"),
        pytest.param(Telemetry(step=33, steps=36, named=34, loaded=-1), 1, 35, 35, id="steps from 0"),
        pytest.param(Telemetry(step=20, steps=45, named=40, loaded=-1), 2, 45, 22, id="two optimizers"),
        pytest.param(Telemetry(step=40, steps=14, named=10, loaded=-1), Fraction(1, 4), 56, 56, id="accumulation"),
        pytest.param(Telemetry(step=25, steps=21, named=20, loaded=15), 2, 51, 25, id="two optimizers, resumed"),
        pytest.param(Telemetry(step=-1, steps=7), 1, 7, 7, id="nothing is named yet"),
        pytest.param(Telemetry(step=640, steps=20, named=20, loaded=-1), Fraction(1, 32), 640, 640, id="samples"),
    ],
)
def test_steps_are_counted_in_the_smaller_of_both_units(
    last: Telemetry, per_step: Fraction, reached: int, number: int
) -> None:
    unit = StepUnit.of([stretch(last)])
    assert (unit.per_step, unit.reached(last), unit.number(last)) == (per_step, reached, number)


RECORDED = Path(__file__).parents[3] / "cli/recorded.jsonl"


def test_costs_of_a_recorded_job_are_those_of_its_report():
    found = report([read(RECORDED)])
    costs = measured_costs(found)
    first_steps = [one.first_step for one in found.failures]
    assert (costs.failures, costs.restarts, costs.saves) == (2, 2, 44)
    assert costs.restart == pytest.approx(median(first_steps) / 1e9 - costs.step)
    assert costs.steps == 2037 and costs.step == pytest.approx((16.34 + 0.245) / 2037, rel=0.01)
    assert costs.snapshot == pytest.approx(0.214 / 44, rel=0.01)
    assert costs.observed == pytest.approx(25.3, rel=0.01)
    events = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    persisted = [(e["bytes"], e["seconds"]) for e in events if e["event"] in ("persisted", "flush_done")]
    assert list(costs.persists) == persisted
    assert costs.persist_rate == pytest.approx(median(size / seconds for size, seconds in persisted))
    assert costs.decided is not None and (costs.decided.memory, costs.decided.storage) == (78, 78)
    assert 6 < costs.start < 9


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
