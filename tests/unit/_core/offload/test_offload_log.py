"""Reports of offloading become events of the agent: few, none twice, and none of a forked process."""

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
from tests.e2e.offload.losses import some_loss
from tests.unit._core.offload.conftest import settle
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


def step(offload: ActivationOffload) -> None:
    with offload:
        loss = some_loss(torch.ones(1 << 18, requires_grad=True), 8)
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


def test_a_report_without_a_saver_is_dropped_with_a_warning(ranks, said, tmp_path, events):  # noqa: F811
    ranks.start()
    ranks.saver.close()
    offload = ActivationOffload(tmp_path, budget="4MiB")
    for _ in range(3):
        step(offload)
    assert "could not report to the saver what is offloaded" in said.text and not events
