"""Decisions on the frequency become events of the saver: each once, without blocking any thread."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any

import pytest

from fastckpt._core import metrics
from fastckpt._core.ipc.messages import Decided
from fastckpt._core.policy.frequency.intervals import Intervals
from fastckpt._core.policy.frequency.tuning import Decision
from fastckpt._core.schedule.decision_log import DecisionLog
from tests.e2e.ddp.conftest import Ranks, until
from tests.unit._core.report.schema import faults


@pytest.fixture
def events() -> Iterator[list[dict[str, Any]]]:
    """What the saver, which is a thread here, records of frequencies."""
    found: list[dict[str, Any]] = []

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "frequency":
            found.append(event)

    metrics.listen(hear)
    yield found
    metrics.unlisten(hear)


def decision(step: int, overhead: float = 0.01, *, changed: bool = True) -> Decision:
    return Decision(step, Intervals(3, 6, 1), overhead, changed, f"why {step}")


def test_each_frequency_decision_is_reported_once_by_the_first_rank(ranks: Ranks, directory, events):
    logs = [DecisionLog(member._writer.link, 0.035) for member in ranks.start(2)]
    first, second, odd = decision(7), decision(9), decision(-1, inf)
    for log in logs:
        log.profiling(0, "why 0")
        for said in (None, first, first, first, second, second, odd):
            log.report(said)
    until(lambda: len(events) >= 4, "all events")
    ranks.end()
    assert not [fault for event in events for fault in faults(event)]
    assert {event["directory"] for event in events} == {str(directory)}
    names = ("step", "memory", "storage", "overhead", "bound", "changed", "why")
    assert [tuple(event[name] for name in names) for event in events] == [
        (0, None, None, None, 0.035, False, "why 0"),
        (7, 3, 6, None, 0.035, True, "why 7"),
        (9, 3, 6, 0.01, 0.035, True, "why 9"),
        (0, 3, 6, None, 0.035, True, "why -1"),
    ]


def test_decisions_sent_in_parts_are_not_mixed_with_other_messages(ranks: Ranks, events):
    """Messages that are longer than what a socket takes at once are not torn by those of another thread."""
    (one,) = ranks.start()
    link = one._writer.link
    many: list[Callable[[], None]] = [
        lambda number=number: link.report_decided(Decided(number, 1, 1, None, None, True, str(number) * 100_000))
        for number in range(100)
    ]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda each: each(), many))
    assert link.status().waiting == 0
    ranks.end()
    assert sorted(event["step"] for event in events) == list(range(100))
