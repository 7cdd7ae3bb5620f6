"""Costs that event logs have measured, of a recorded job that lost a worker twice."""

import json
from pathlib import Path
from statistics import median

import pytest

from fastckpt._core.report.events import read
from fastckpt._core.report.measured_costs import measured_costs
from fastckpt._core.report.report import report

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
