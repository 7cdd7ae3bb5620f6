"""Reports of offloading become events of the agent: few, none twice, also those from before there is a checkpointer."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastckpt._core import metrics
from fastckpt._core.client import worker_reports
from fastckpt._core.ipc.offload_messages import OffloadEnded
from fastckpt._core.offload import offload_log
from fastckpt.offload import ActivationOffload
from tests.e2e.ddp.conftest import Ranks, directory, ranks, said, until  # noqa: F401 (fixtures)
from tests.unit._core.offload.conftest import settle, store_of
from tests.unit._core.report.schema import faults

FOREVER = 1e6


@pytest.fixture
def events(monkeypatch) -> Iterator[list[dict[str, Any]]]:
    """What is recorded of offloading in this process, where the saver is a thread; it had no connection before."""
    monkeypatch.setattr(worker_reports, "_reports", worker_reports._Reports())
    found: list[dict[str, Any]] = []

    def hear(event: dict[str, Any]) -> None:
        if event["event"].startswith("offload_"):
            assert not faults(event)
            found.append(event)

    metrics.listen(hear)
    yield found
    metrics.unlisten(hear)


def names(events: list[dict[str, Any]]) -> list[str]:
    return [event["event"].removeprefix("offload_") for event in events]


def step(offload: ActivationOffload, size: int = 1 << 18, count: int = 8) -> None:
    value = torch.ones(size, requires_grad=True)
    with offload:
        total = value
        for _ in range(count):
            total = total.exp().tanh()
        loss = total.sum()
    settle(offload)
    loss.backward()


def test_the_number_of_events_does_not_grow_with_the_steps(ranks, tmp_path, monkeypatch, events):  # noqa: F811
    monkeypatch.setattr(offload_log, "PAUSE", FOREVER)
    ranks.start()
    offload = ActivationOffload(tmp_path, budget="4MiB")
    for _ in range(12):
        step(offload)
    until(lambda: len(events) >= 2, "the plan and the first step that had one")
    assert names(events) == ["planned", "measured"] and events[1]["steps"] == 1
    ranks.end()
    assert names(events) == ["planned", "measured", "measured"]
    last, report = events[-1], offload.report()
    assert (last["forwards"], last["steps"], last["written"]) == (12, 11, report.written)
    assert last["planned_written"] == 11 * events[0]["written"] and last["step_wait"] >= 0
    assert events[0]["saved"] == events[0]["kept"] + events[0]["offloaded"]
    offload.report()
    assert len(events) == 3, "what is reported is not reported again"


def test_steps_that_always_differ_report_their_first_plans_and_count_all(ranks, tmp_path, monkeypatch, events):  # noqa: F811
    monkeypatch.setattr(offload_log, "PAUSE", FOREVER)
    ranks.start()
    offload = ActivationOffload(tmp_path, budget="4MiB")
    for turn in range(offload_log.FIRST + 4):
        step(offload, size=(1 << 18) + 1024 * turn)
    until(lambda: len(events) >= offload_log.FIRST, "the first plans")
    offload._offloader._log._plans_due = 0.0
    step(offload, size=1 << 19)
    ranks.end()
    profiled = [event["profiled"] for event in events if event["event"] == "offload_planned"]
    assert profiled == [*range(1, offload_log.FIRST + 1), offload_log.FIRST + 4]


def test_reports_from_before_the_checkpointer_reach_its_agent(ranks, tmp_path, events):  # noqa: F811
    offload = ActivationOffload(tmp_path, budget="4MiB")
    step(offload)
    step(offload)
    offload.report()
    assert names(events) == ["planned", "measured"], "so far they are events of this process"
    own, events[:] = [*events], []
    ranks.start()
    until(lambda: len(events) >= 2, "the same from the agent")
    ranks.end()
    for mine, its in zip(own, events, strict=True):
        assert {name: mine[name] for name in mine if name not in ("time", "monotonic")} == {
            name: its[name] for name in its if name not in ("time", "monotonic")
        }


def test_the_end_of_offloading_is_reported_at_once_and_steps_after_it_count_no_plan(
    ranks, tmp_path, monkeypatch, events  # noqa: F811
):  # fmt: skip
    monkeypatch.setattr(offload_log, "PAUSE", FOREVER)
    ranks.start()
    offload = ActivationOffload(tmp_path, budget="4MiB")
    for _ in range(3):
        step(offload)
    store = store_of(offload)
    with store._moved:
        store._end(OSError(28, "No space left on device"))
    until(lambda: "ended" in names(events), "the end")
    step(offload)
    step(offload)
    ranks.end()
    [end] = [event for event in events if event["event"] == "offload_ended"]
    assert (end["error"], end["directory"]) == ("No space left on device", str(tmp_path))
    assert end["remedy"] == offload_log.REMEDY
    assert names(events)[:4] == ["planned", "measured", "ended", "measured"]
    assert [event["steps"] for event in events if event["event"] == "offload_measured"][-1] <= 2


def test_a_forked_process_does_not_speak_on_the_connection_of_its_parent(ranks, events):  # noqa: F811
    (one,) = ranks.start()
    message = OffloadEnded(1, "/nvme", "of a child", "none")
    child = os.fork()
    if child == 0:
        worker_reports.report(message)
        worker_reports._of_this_process().conclude()
        os._exit(0 if names(events) == ["ended"] and not worker_reports._of_this_process().open else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert one._writer.link.status().waiting == 0 and not events
    worker_reports.report(message)
    until(lambda: len(events) == 1, "the parent's own")
