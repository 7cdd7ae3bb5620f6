"""Windows of steps on their way to the first node: real blocks of telemetry, real servers of savers between nodes."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.memory.telemetry import PLACES, StepWindow, TelemetryBlock, telemetry_name, unlink
from fastckpt_run.stragglers.straggler_judge import StragglerJudge
from fastckpt_run.stragglers.straggler_watch import StragglerWatch
from fastckpt_run.watch.watcher import WatchedWorkers
from tests.unit.fastckpt_run.watch.test_node_channel import Agents

MS = 1_000_000
CALM, SLOW = 60 * MS, 90 * MS


def window(number: int, own: int = CALM) -> StepWindow:
    return StepWindow(number, (5 * MS, 20 * MS, own - 30 * MS, 5 * MS, 200 * MS - own), own)


class Node:
    """An agent with two workers, whose lines the test writes; and their saver."""

    def __init__(self, number: int, folder: Path, agents: Agents, stack: contextlib.ExitStack) -> None:
        self.number, self.channel, self.meet = number, agents.channels[number], agents.meet
        self.block = TelemetryBlock(telemetry_name(folder / str(number)), 2)
        stack.callback(unlink, self.block.name)
        stack.callback(self.block.close)
        self.lines = [self.block.line(rank) for rank in range(2)]
        self.watch = StragglerWatch(self, self.channel, lambda: self.workers)

    def telemetry(self) -> Any:
        return {"run": [self.block.read(rank) for rank in range(2)]}

    def windows(self) -> Any:
        return {"run": [self.block.windows(rank) for rank in range(2)]}

    def start(self) -> None:
        ranks = {local: 2 * self.number + local for local in range(2)}
        self.workers = WatchedWorkers(time.monotonic_ns(), {}, ranks, 4)
        for line in self.lines:
            line.begin(0, 1, 0)

    def train(self, numbers: range, *owns: int) -> None:
        for line, own in zip(self.lines, owns or (CALM, CALM), strict=True):
            for number in numbers:
                line.close_window(window(number, own))


@pytest.fixture
def nodes(tmp_path) -> Iterator[list[Node]]:
    with contextlib.ExitStack() as stack:
        agents = Agents(2, stack)
        nodes = [Node(number, tmp_path, agents, stack) for number in range(2)]
        agents.meet()
        for node in nodes:
            node.start()
        yield nodes


def look(nodes: list[Node]) -> None:
    for node in nodes:
        node.watch.look()


def verdicts(events: list[dict[str, Any]]) -> list[tuple[int, bool, str]]:
    return [(each["rank"], each["slow"], each["part"]) for each in events if each["event"] == "straggler"]


def test_a_slow_rank_of_another_node_is_named_by_the_first_one_and_so_is_its_end(nodes, events, caplog):
    for node in nodes:
        node.train(range(1, 8))
    look(nodes)
    assert verdicts(events) == []
    nodes[0].train(range(8, 12))
    nodes[1].train(range(8, 12), CALM, SLOW)
    look(nodes)
    assert verdicts(events) == [(3, True, "backward")]
    assert nodes[0].watch.slow[3].cost == pytest.approx(30 / 170, rel=0.01)
    assert nodes[0].watch.times.keys() == {0, 1, 2, 3} and not nodes[1].watch.times
    assert "rank 3, backward: the job is 18% slower (90.0 ms of each step are its own" in caplog.text
    for node in nodes:
        node.train(range(12, 18))
    look(nodes)
    look(nodes)
    assert verdicts(events) == [(3, True, "backward"), (3, False, "")]
    assert not nodes[0].watch.slow


def test_windows_are_sent_once_and_again_if_the_first_node_did_not_answer(nodes, monkeypatch):
    sent: list[Any] = []
    ask = nodes[1].channel.ask_first

    def asked(subject: str, body: Any, timeout: float) -> Any:
        sent.append([row[0] for row in body["ranks"]["2"]])
        if len(sent) == 1:
            raise ConnectionResetError("the first node is away")
        return ask(subject, body, timeout)

    monkeypatch.setattr(nodes[1].channel, "ask_first", asked)
    nodes[1].train(range(1, 4))
    nodes[1].watch.look()
    nodes[1].train(range(4, 5))
    for _ in range(3):
        nodes[1].watch.look()
    assert sent == [[2, 3], [2, 3, 4]], "the first window is none to compare"


def test_what_a_node_sends_of_workers_before_the_last_start_is_discarded(nodes, events):
    nodes[0].train(range(1, 6))
    nodes[1].train(range(1, 6), CALM, SLOW)
    nodes[0].watch.look()
    nodes[1].train(range(6, 7), CALM, SLOW)
    nodes[1].watch.look()
    assert [each[0] for each in verdicts(events)] == [3]
    nodes[0].meet()
    nodes[0].start()
    nodes[0].train(range(1, 12))
    nodes[0].watch.look()
    assert not nodes[0].watch.slow, "a new round begins without verdicts"
    nodes[1].train(range(7, 12), CALM, SLOW)
    nodes[1].watch.look()
    assert not nodes[0].watch.times, "these were workers of the round before"
    nodes[1].start()
    nodes[1].train(range(1, 12))
    look(nodes)
    assert nodes[0].watch.times.keys() == {0, 1, 2, 3}
    assert [each[0] for each in verdicts(events)] == [3]


def row(number: int, own: int = CALM) -> list[int]:
    one = window(number, own)
    return [one.number, one.own, *one.parts]


def send(judge: StragglerJudge, node: int, ranks: dict[Any, Any], since: int = 1) -> None:
    judge.receive(node, {"since": since, "host": f"host-{node}", "ranks": ranks})


@pytest.fixture
def judge() -> StragglerJudge:
    judge = StragglerJudge()
    judge.begin(2)
    return judge


def test_windows_count_in_the_order_of_their_numbers_however_late_a_node_is(judge, events):
    rows = {rank: [row(number, SLOW if rank else CALM) for number in range(2, 8)] for rank in range(2)}
    for late in (0, 1):
        judge.begin(2)
        send(judge, 1 - late, {str(1 - late): rows[1 - late]}, late)
        for one in reversed(rows[late]):
            send(judge, late, {str(late): [one]}, late)
        assert len(judge.times) == 2
        for _ in range(2):
            send(judge, late, {str(late): rows[late]}, late)
        assert judge.slow.keys() <= {1} and len(verdicts(events)) <= 1 + late, "twice is once"


def test_windows_that_a_rank_lacks_are_passed_over_and_take_no_memory(judge, events):
    for number in range(2, 14):
        send(judge, 0, {"0": [row(number)]})
        if number % 3:
            send(judge, 1, {"1": [row(number, SLOW)]})
    assert verdicts(events) == [(1, True, "backward")]
    judge.begin(2)
    for number in range(2, 1000):
        send(judge, 0, {"0": [row(number)], "7": [row(number)]}, since=2)
    assert len(judge._open) == 2 * PLACES
