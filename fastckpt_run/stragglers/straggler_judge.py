"""Judgement of all ranks on the first node, from the windows of steps that nodes send."""

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.ipc.sealed import reading
from fastckpt._core.memory.step_clock import STEPS
from fastckpt._core.memory.telemetry import PARTS, PLACES
from fastckpt._core.policy.stragglers import RankTimes, SlowRank, Stragglers

logger = logging.getLogger("fastckpt.launcher")

NANO = 1e-9


class StragglerJudge:
    """Judges all ranks on the first node, from the windows that nodes send in any order, or not at all.

    Only windows that all ranks have closed are judged, in order. A node whose workers were started again begins again;
    windows of workers that ran before the last start of this node's are discarded.

    Attributes:
        times: The last window of all ranks that was judged, by rank.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._old = set[tuple[int, int]]()
        self.begin(0)

    def begin(self, world_size: int) -> None:
        """Judge the workers of a new round."""
        with self._lock:
            self._old |= {*getattr(self, "_starts", {}).items()}
            self._world_size = world_size
            self._starts = dict[int, int]()
            self._hosts = dict[int, str]()
            self._open = dict[int, dict[int, RankTimes]]()
            self._last = 0
            self._stragglers = Stragglers(STEPS)
            self.times: Mapping[int, RankTimes] = {}

    @property
    def slow(self) -> Mapping[int, SlowRank]:
        """The slow ranks of now, by rank."""
        return dict(self._stragglers.slow)

    def receive(self, node: int, body: dict[str, Any]) -> dict[str, Any]:
        """Take the windows of a node; raises ProtocolError if these are none."""
        with reading("the windows of steps"):
            since, host = int(body["since"]), str(body["host"])
            rows = {int(rank): [_parsed(row) for row in each] for rank, each in body["ranks"].items()}
        with self._lock:
            if (node, since) not in self._old:
                self._take(node, since, host, rows)
        return {}

    def _take(self, node: int, since: int, host: str, rows: Mapping[int, Sequence[tuple[int, RankTimes]]]) -> None:
        if self._starts.setdefault(node, since) != since:
            self._forget(node, rows.keys())
            self._starts[node] = since
        for rank in rows.keys() & range(self._world_size):
            self._hosts[rank] = host
            later = [row for row in rows[rank] if row[0] > self._last]
            for number, times in later:
                self._open.setdefault(number, {})[rank] = times
        for number in [each for each in sorted(self._open) if len(self._open[each]) == self._world_size]:
            self._judge(number)
        for number in sorted(self._open)[: -2 * PLACES]:  # a rank is missing in them
            del self._open[number]

    def _forget(self, node: int, ranks: Collection[int]) -> None:
        """Discard the windows of a node's workers before their restart, also those that it may still send."""
        self._old.add((node, self._starts[node]))
        for there in self._open.values():
            for rank in ranks:
                there.pop(rank, None)

    def _judge(self, number: int) -> None:
        self._last, self.times = number, self._open[number]
        self._open = {later: times for later, times in self._open.items() if later > number}
        began, ended = self._stragglers.see(number, self.times)
        for one in began:
            where = f"{self._hosts.get(one.rank, '?')}, rank {one.rank}, {one.part}"
            times = f"{_text(one.own)} of each step are its own, of the others {_text(one.others)}"
            logger.warning("%s: the job is %.0f%% slower (%s)", where, 100 * one.cost, times)
            self._record(one, slow=True)
        for one in ended:
            logger.warning("%s, rank %d is as fast as the others again", self._hosts.get(one.rank, "?"), one.rank)
            self._record(one, slow=False)

    def _record(self, one: SlowRank, *, slow: bool) -> None:
        metrics.event(
            "straggler",
            rank=one.rank,
            host=self._hosts.get(one.rank, ""),
            slow=slow,
            part=one.part if slow else "",
            cost=one.cost if slow else 0.0,
            own=one.own,
            others=one.others,
            window=one.number,
        )


def _parsed(row: Any) -> tuple[int, RankTimes]:
    number, own, *parts = (int(value) for value in row)
    if number < 1 or len(parts) != len(PARTS) or min(own, *parts) < 0:
        raise ValueError(f"{row!r} is no window")
    return number, RankTimes(own * NANO, tuple(value * NANO for value in parts))


def _text(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
