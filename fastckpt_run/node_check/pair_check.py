"""Check of several nodes: in two rounds pairs of them exchange data, and the first one decides which are bad or slow.

The first node reads the message of each, and writes each its own answer: 3 messages there, and 3 back.
"""

import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from fastckpt._core.ipc.listener import listen
from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.policy.node_check import (
    CheckResult,
    NodeVerdict,
    Pair,
    Verdict,
    below_the_others,
    first_pairs,
    in_words,
    judge,
    second_pairs,
)
from fastckpt.errors import FastckptError
from fastckpt_run.node_check.board import Board
from fastckpt_run.node_check.exchange import follow, lead

EXCHANGE = 8.0
"""Seconds that one exchange may take, which takes half of one."""
_MARGIN = 10.0
"""Seconds that a node may be late with its message."""
_FAREWELL = 5.0
"""Seconds that the first node waits for the others to have read the verdict."""
_PAUSE = 0.1
"""Seconds after which a peer that could not be served is followed by the next."""
_NAMED = 8
"""Nodes that a message names at most."""
_PENDING = 64
"""Connections that prove their identity at the same time, at most; further ones are closed."""


class CheckGone(FastckptError):
    """The node that decides does not answer."""


@dataclass(frozen=True)
class PairOutcome:
    """The outcome for one node.

    Attributes:
        result: That of this node.
        is_bad: True if it had no good exchange: a node that is only slow has a problem, but is not bad.
        bad: Ranks of the bad nodes; complete on the first node, else the first few.
        slow: Ranks of the slow ones; complete where ``bad`` is.
        hosts: The hosts of these, by rank.
        absent: Ranks of those that did not come.
    """

    result: CheckResult
    is_bad: bool = False
    bad: list[int] = field(default_factory=list)
    slow: list[int] = field(default_factory=list)
    hosts: dict[int, str] = field(default_factory=dict)
    absent: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Arrival:
    """Data that a node sends about itself."""

    address: str
    host: str
    values: Mapping[str, float]


class PairCheck:
    """One node's part in a check of several.

    Args:
        board: Board for their messages; of this check alone.
        rank: The rank of this node.
        ranks: Ranks of all nodes that should come, in order; the first one decides.
        address: The name or address by which the others reach this host.
        results: Results of this node's own checks; rates of several nodes are compared.
        wait: Seconds to wait for others to come.
    """

    def __init__(
        self, board: Board, rank: int, ranks: Sequence[int], address: str, results: Sequence[CheckResult], wait: float
    ) -> None:
        self._board, self._rank, self._ranks, self._wait = board, rank, ranks, wait
        self._host, self._address = socket.gethostname(), address
        self._values = {each.name: each.value for each in results if each.value is not None and _is_rate(each)}
        self._begin = 0.0

    def run(self) -> PairOutcome:
        """Take part, to the verdict.

        Raises:
            CheckGone: The node that decides does not.
            RoundEnded: The round has ended meanwhile.
            OSError: This host cannot listen.
            RuntimeError, StoreLost: The store is lost.
        """
        # 1. listen   2. send the address   3. exchange with nodes that the first one names, twice   4. read the verdict
        self._begin = time.monotonic()
        with _Listener() as listener:
            own = _Arrival(f"{self._address}:{listener.port}", self._host, self._values)
            self._board.put(f"join/{self._rank}", json.dumps(asdict(own)))
            if self._rank == self._ranks[0]:
                return self._decide(listener)
            end = self._begin + self._wait + _MARGIN
            for turn in (1, 2):
                plan = self._own(f"plan{turn}", end)
                self._report(turn, plan, listener)
                end = time.monotonic() + float(plan["seconds"]) + _MARGIN
            outcome = self._read(self._own("verdict", end))
            self._board.put(f"read/{self._rank}", "")
            return outcome

    # --- the first node

    def _decide(self, listener: "_Listener") -> PairOutcome:
        end = self._begin + self._wait
        came = {rank: _arrival(text) for rank, text in self._taken("join", self._ranks, end).items()}
        present = sorted(rank for rank, each in came.items() if each is not None)
        nodes = {rank: each for rank in present if (each := came[rank]) is not None}
        secret = secrets.token_hex(32)
        first = self._hold(1, first_pairs(present), nodes, secret, listener)
        second = self._hold(2, second_pairs(present, first), nodes, secret, listener)
        found = judge(present, first, second)
        slow = _slow_checks({rank: each.values for rank, each in nodes.items()})
        own: PairOutcome | None = None
        absent = [rank for rank in self._ranks if rank not in nodes]
        bad = [rank for rank in present if found[rank].verdict is Verdict.PROBLEM]
        late = [rank for rank in present if found[rank].is_slow or rank in slow]
        hosts = {rank: nodes[rank].host for rank in (*bad, *late)}
        took = time.monotonic() - self._begin
        for rank in present:
            result = _result(found[rank], slow.get(rank, ""), nodes, took)
            if rank == self._rank:
                own = PairOutcome(result, rank in bad, bad, late, hosts, absent)
            else:
                some = [*bad[:_NAMED], *late[:_NAMED]]
                named = {each: hosts[each] for each in some}
                few = PairOutcome(result, rank in bad, bad[:_NAMED], late[:_NAMED], named, absent[:_NAMED])
                self._board.put(f"verdict/{rank}", json.dumps(asdict(few)))
        assert own is not None
        # It may have to leave, with the store.
        self._taken("read", [rank for rank in present if rank != self._rank], time.monotonic() + _FAREWELL)
        return own

    def _hold(
        self, turn: int, pairs: Sequence[Pair], nodes: Mapping[int, _Arrival], secret: str, listener: "_Listener"
    ) -> dict[Pair, float | None]:
        """Hold a round; return the measurement of each pair."""
        tasks: dict[int, list[dict[str, Any]]] = {rank: [] for rank in nodes}
        for one, other in pairs:
            tasks[one].append({"with": other, "address": nodes[other].address})
            tasks[other].append({"with": one, "address": ""})
        seconds = EXCHANGE * (max(map(len, tasks.values())) + 1)
        plans = {rank: {"secret": secret, "tasks": own, "seconds": seconds} for rank, own in tasks.items()}
        for rank, plan in plans.items():
            if rank != self._rank:
                self._board.put(f"plan{turn}/{rank}", json.dumps(plan))
        self._report(turn, plans[self._rank], listener)
        reports = self._taken(f"result{turn}", list(nodes), time.monotonic() + seconds)
        rates = {rank: _rates(text) for rank, text in reports.items()}
        return {pair: _agreed(pair, rates) for pair in pairs}

    # --- each node

    def _report(self, turn: int, plan: Mapping[str, Any], listener: "_Listener") -> None:
        rates = dict[int, float]()
        for number, task in enumerate(plan["tasks"]):
            # Whoever is waited for may have had to wait for its partners before.
            end = time.monotonic() + EXCHANGE * (1 if task["address"] else number + 2)
            # A partner that is gone, silent, or no node of this check: its failure is the result.
            with suppress(OSError, FastckptError):
                rates[task["with"]] = self._exchange(turn, task, bytes.fromhex(plan["secret"]), listener, end)
        self._board.put(f"result{turn}/{self._rank}", json.dumps({str(rank): rate for rank, rate in rates.items()}))

    def _exchange(self, turn: int, task: Mapping[str, Any], secret: bytes, listener: "_Listener", end: float) -> float:
        if task["address"]:
            link = SealedConnection.connect(task["address"], secret, EXCHANGE)
            try:
                link.ask({"from": self._rank, "turn": turn})
                return lead(link, end)
            finally:
                link.close()
        link = listener.accept((turn, task["with"]), secret, end)
        try:
            link.send({})
            return follow(link, min(end, time.monotonic() + EXCHANGE))
        finally:
            link.close()

    def _own(self, what: str, end: float) -> dict[str, Any]:
        """Return the entry that the first node has written for this one; raises CheckGone."""
        found = self._taken(what, [self._rank], end)
        if not found:
            raise CheckGone(f"the node of rank {self._ranks[0]}, which decides, has not answered in time")
        plan: dict[str, Any] = json.loads(found[self._rank])
        return plan

    def _taken(self, what: str, ranks: Sequence[int], end: float) -> dict[int, bytes]:
        found = self._board.take([f"{what}/{rank}" for rank in ranks], end)
        return {int(name.rpartition("/")[2]): text for name, text in found.items()}

    def _read(self, verdict: dict[str, Any]) -> PairOutcome:
        verdict["result"] = CheckResult.from_record(verdict["result"])
        verdict["hosts"] = {int(rank): host for rank, host in verdict["hosts"].items()}
        return PairOutcome(**verdict)


class _Listener:
    """Takes connections of other nodes, and hands each out to its waiting thread."""

    def __init__(self) -> None:
        self._socket = listen()
        self.port: int = self._socket.getsockname()[1]
        self._waiting: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._links = dict[tuple[int, int], SealedConnection]()
        self._changed = threading.Condition()
        self._free = threading.BoundedSemaphore(_PENDING)
        self._secret: bytes | None = None
        self._is_closed = False
        threading.Thread(target=self._serve, name="fastckpt-pair-check", daemon=True).start()

    def __enter__(self) -> "_Listener":
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for link in self._links.values():
            link.close()

    def accept(self, who: tuple[int, int], secret: bytes, end: float) -> SealedConnection:
        """The connection of a node in a round, given by (round, rank); raises TimeoutError."""
        with self._changed:
            self._secret = secret
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: who in self._links, end - time.monotonic()):
                raise TimeoutError
            return self._links.pop(who)

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                self._accept()
            # Such as no descriptor, or no thread: whoever comes later is served.
            except (OSError, RuntimeError):
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, _PAUSE)

    def _accept(self) -> None:
        connected, _ = self._socket.accept()
        if not self._free.acquire(blocking=False):
            connected.close()
            return
        try:
            threading.Thread(target=self._greet, args=(connected,), daemon=True).start()
        except RuntimeError:
            self._free.release()
            connected.close()
            raise

    def _greet(self, connected: socket.socket) -> None:
        try:
            with self._changed:  # it may come before this node has read its plan, which has the secret
                self._changed.wait_for(lambda: self._secret is not None or self._is_closed, EXCHANGE)
                secret = self._secret
            if secret is None or self._is_closed:
                connected.close()
                return
            link = SealedConnection.accept(connected, secret, EXCHANGE)
            greeting = link.receive() or {}
            who = greeting.get("turn"), greeting.get("from")
            with self._changed:
                if type(who[0]) is not int or type(who[1]) is not int or self._is_closed:
                    link.close()
                    return
                self._links[who[0], who[1]] = link
                self._changed.notify_all()
        except (OSError, FastckptError):
            connected.close()  # a stranger, or one that is gone
        finally:
            self._free.release()


def _is_rate(result: CheckResult) -> bool:
    return result.unit.endswith("/s")


def _arrival(text: bytes) -> _Arrival | None:
    try:
        found = _Arrival(**json.loads(text))
        return found if isinstance(found.values, dict) else None
    except (ValueError, TypeError):
        return None


def _rates(text: bytes) -> dict[int, float]:
    try:
        return {int(rank): float(rate) for rank, rate in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def _agreed(pair: Pair, rates: Mapping[int, Mapping[int, float]]) -> float | None:
    """Return the rate of a pair, the lower one of both nodes' measurements; None if one has not measured."""
    one, other = (rates.get(a, {}).get(b) for a, b in (pair, pair[::-1]))
    return None if one is None or other is None else min(one, other)


def _slow_checks(values: Mapping[int, Mapping[str, float]]) -> dict[int, str]:
    """Nodes with a rate below a share of the median of the others, with its description."""
    found = dict[int, str]()
    for name in dict.fromkeys(name for own in values.values() for name in own):
        there = {rank: own[name] for rank, own in values.items() if name in own}
        for rank in below_the_others(there):
            found.setdefault(rank, f"{name} at {in_words(there[rank])}, less than half of the other nodes")
    return found


def _result(found: NodeVerdict, slow: str, nodes: Mapping[int, _Arrival], seconds: float) -> CheckResult:
    names = ", ".join(nodes[rank].host for rank in found.failed[:_NAMED])
    if found.verdict is Verdict.PROBLEM:
        message = f"exchanges no data with {names}"
    elif found.verdict is Verdict.UNKNOWN:
        message = f"exchanges no data with {names}; it cannot be told whose fault that is"
    elif found.is_slow:
        message = "exchanges data at less than half of the rate of the other nodes"
    else:
        message = slow
    verdict = Verdict.PROBLEM if message and found.verdict is Verdict.OK else found.verdict
    return CheckResult("pair", verdict, message, found.rate, "MB/s", None, seconds)
