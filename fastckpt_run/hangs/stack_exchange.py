"""Exchange of stacks among the agents of a job that hangs: the first node's asks all, once, and groups them."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastckpt._core.ipc.sealed import reading
from fastckpt._core.policy.hangs import Witness
from fastckpt._core.policy.stack_groups import FRAMES, SHOWN, CaughtRank, StackGroups, grouped
from fastckpt.errors import FastckptError, ProtocolError
from fastckpt_run.hangs.worker_inspection import STACKS_TIMEOUT
from fastckpt_run.watch.node_channel import Body, NodeChannel

logger = logging.getLogger("fastckpt.launcher")

HANG, STACKS, FOUND = "hang", "hang stacks", "hang found"
"""Messages: to the first node, for the groups; to each node, for the stacks of its workers; to each, the finding."""
ALL_IDLE, IDLE = "hang all idle", "hang idle"
"""Names of the seconds for which nobody has done anything: on any node, and on one."""
IDLE_TIMEOUT = 2.0
"""Seconds that nodes have to report their activity; 0 counts for one that has not."""
IDLE_SHARED = 5.0
"""Seconds for which that answers others."""
NODE_TIMEOUT = STACKS_TIMEOUT + 2.0
"""Seconds that a node has to answer with the stacks of its workers."""
TOLD_TIMEOUT = 1.0
"""Seconds that nodes have to take note of the findings."""
REACH = 3.0
"""Seconds that a node has to answer at all: a lost node or a stopped agent costs no more."""
TIMEOUT = NODE_TIMEOUT + TOLD_TIMEOUT + 2.0
"""Seconds that the first node has to answer."""
AT_ONCE = 256
"""Nodes that are asked at once: their agents wait for workers most of the time, this one for them."""
SHARED = 10.0
"""Seconds for which collected stacks answer others, which find the same hang a moment later."""


@dataclass(frozen=True)
class NodeReport:
    """The workers of one node, for the others.

    Attributes:
        host: Its name.
        age: Seconds since its workers were started.
        is_occupied: True if one of them does something that others may wait for: it keeps to the limit of its phase, or
            is being debugged.
        idle: Seconds for which none of them has done anything.
        world: Number of ranks in the job.
        ranks: Ranks of this node, each with the seconds for which it is silent; infinite if it never reported.
    """

    host: str
    age: float
    is_occupied: bool
    idle: float
    world: int
    ranks: Sequence[tuple[CaughtRank, float]]

    def to_json(self) -> Body:
        """Return the stacks in the form that `of_json` reads."""
        stacks: dict[tuple[str, ...], int] = {}
        ranks = []
        for each, silent in self.ranks:
            stack = stacks.setdefault(each.frames[:FRAMES], len(stacks))
            witness = each.witness
            ranks.append(
                {
                    "rank": witness.rank,
                    "steps": witness.steps,
                    "state": witness.state,
                    "has_left": witness.has_left,
                    "waits": witness.waits,
                    "idle": witness.idle,
                    "silent": None if math.isinf(silent) else silent,
                    "place": each.place,
                    "in_collective": each.in_collective,
                    "stack": stack,
                }
            )
        return {
            "host": self.host,
            "age": self.age,
            "occupied": self.is_occupied,
            "idle": self.idle,
            "world": self.world,
            "ranks": ranks,
            "stacks": [list(stack) for stack in stacks],
        }

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> "NodeReport":
        """Read an answer; raises LookupError, TypeError or ValueError if it is nothing of the kind."""
        host, stacks = str(found["host"]), [tuple(map(str, stack)) for stack in found["stacks"]]
        ranks = []
        for each in found["ranks"]:
            flags = bool(each["has_left"]), bool(each["waits"])
            place = str(each["place"])
            witness = Witness(
                int(each["rank"]), int(each["steps"]), str(each["state"]), has_left=flags[0], waits=flags[1]
            )
            witness = replace(witness, idle=_seconds(each["idle"]))
            caught = CaughtRank(witness, host, stacks[each["stack"]], place, bool(each["in_collective"]))
            ranks.append((caught, math.inf if each["silent"] is None else float(each["silent"])))
        idle = _seconds(found["idle"])
        return cls(host, float(found["age"]), bool(found["occupied"]), idle, int(found["world"]), ranks)


@dataclass(frozen=True)
class Collected:
    """The answer of the first node.

    Attributes:
        groups: Of all ranks; None if workers of other nodes are occupied, so that these may wait for them.
        occupied: Hosts of these workers.
        idle: Seconds for which nobody on any node has done anything; 0 if one has not answered.
    """

    groups: StackGroups | None
    occupied: tuple[str, ...] = ()
    idle: float = 0.0


class StackExchange:
    """The part of one agent in the exchange.

    The agent that finds that its workers hang asks the first node's. That one asks all others, once for all that
    come within `SHARED` seconds: for a job of n nodes there are 3 n questions, whoever finds the hang.

    Args:
        channel: To the agents of other nodes.
        report: The report on this node's workers; called in any thread.
        idle: Seconds for which none of them has done anything; called in any thread.
        told: Called in any thread, with the host that found a hang, and the groups, before workers are killed there.
    """

    def __init__(
        self,
        channel: NodeChannel,
        report: Callable[[], NodeReport],
        idle: Callable[[], float],
        told: Callable[[str, StackGroups], None],
    ) -> None:
        self._channel, self._report, self._told = channel, report, told
        self._lock = threading.Lock()
        self._askers: set[int] = set()
        self._last: tuple[object, float, float, Body] | None = None
        channel.answer(HANG, self._answer_groups)
        channel.answer(STACKS, lambda sender, body: report().to_json())
        channel.answer(FOUND, self._take_note)
        self._idle_lock = threading.Lock()
        self._last_idle: tuple[object, float, float] | None = None
        channel.answer(ALL_IDLE, self._answer_idle)
        channel.answer(IDLE, lambda sender, body: {"idle": idle()})

    @property
    def nodes(self) -> int:
        """Number of nodes in the round."""
        return self._channel.nodes

    def collect(self, host: str, silent: float, lately: float) -> Collected:
        """Ask for the stacks of all nodes; takes up to `REACH` and `TIMEOUT` seconds.

        Args:
            host: The name of this one.
            silent: Seconds since its hung workers reported last.
            lately: Seconds of silence below which a rank goes on.

        Raises:
            OSError: The first node does not answer in time.
            FastckptError: It cannot; for example, it is in another round.
        """
        began = time.monotonic()
        body = {"host": host, "silent": silent, "lately": lately}
        # Not `ask_first`: others' messages to the first node would wait for this answer.
        answer = self._channel.ask(0, HANG, body, TIMEOUT, reach=REACH)
        with reading("the first node's answer"):
            occupied = tuple(map(str, answer["occupied"]))
            groups = None if occupied else StackGroups.of_json(answer["groups"])
        logger.debug("collected the stacks of %d nodes in %.3f s", self.nodes, time.monotonic() - began)
        return Collected(groups, occupied, _seconds(answer.get("idle")))

    def idle(self) -> float:
        """Seconds for which nobody on any node has done anything, by the first one's reports; 0 without its answer."""
        try:
            return _seconds(self._channel.ask(0, ALL_IDLE, {}, REACH, reach=REACH).get("idle"))
        except (OSError, FastckptError):
            return 0.0

    # --- the first node

    def _answer_groups(self, sender: int, body: Body) -> Body:
        host, silent, lately = str(body["host"]), float(body["silent"]), float(body["lately"])
        self._askers.add(sender)  # before the wait: a node that gets an answer in the end needs no message
        if not self._lock.acquire(timeout=TIMEOUT):
            raise ProtocolError("the stacks of all nodes are still being collected")
        try:
            now, round = time.monotonic(), self._channel.round
            if self._last is not None:
                of, began, ended, found = self._last
                # Stacks from before the silence that is asked about are another hang's.
                if of is round and now - ended < SHARED and now - silent < began:
                    return found
            found = self._collect(host, lately)
            self._last = None if found["occupied"] else (round, now, time.monotonic(), found)
            return found
        finally:
            self._lock.release()
            self._askers.discard(sender)

    def _collect(self, host: str, lately: float) -> Body:
        # 1. all nodes at once   2. answers of another round are left out   3. groups   4. send these to all others
        reports = self._reports(lately)
        if occupied := [report.host for report in reports.values() if report.is_occupied]:
            return {"occupied": occupied, "idle": 0.0, "groups": None}
        ranks: dict[int, CaughtRank] = {}
        for report in reports.values():
            for caught, silent in report.ranks:
                witness = replace(caught.witness, goes_on=silent < lately)
                ranks.setdefault(witness.rank, replace(caught, witness=witness))
        hosts = self._channel.hosts
        unheard = [hosts[node] for node in range(len(hosts)) if node not in reports]
        world = max((report.world for report in reports.values()), default=0)
        groups = grouped([*ranks.values()], world, unheard).to_json()
        body = {"host": host, "groups": groups}
        told = [node for node in reports if node not in self._askers]
        self._channel.ask_all(FOUND, body, TOLD_TIMEOUT, nodes=told, at_once=AT_ONCE)
        idle = 0.0 if unheard else min(report.idle for report in reports.values())
        return {"occupied": [], "idle": idle, "groups": groups}

    def _reports(self, lately: float) -> dict[int, NodeReport]:
        found = {}
        for node, answer in self._channel.ask_all(STACKS, {}, NODE_TIMEOUT, at_once=AT_ONCE, reach=REACH).items():
            with contextlib.suppress(FastckptError), reading("the report of a node"):
                report = NodeReport.of_json(answer)
                # Workers that were started while the others were silent are in another round: nobody waits for them.
                if report.age >= lately:
                    found[node] = report
        return found

    def _answer_idle(self, sender: int, body: Body) -> Body:
        with self._idle_lock:
            now, round = time.monotonic(), self._channel.round
            if self._last_idle is None or self._last_idle[0] is not round or now - self._last_idle[1] > IDLE_SHARED:
                answers = self._channel.ask_all(IDLE, {}, IDLE_TIMEOUT, at_once=AT_ONCE)
                idle = [_seconds(answer.get("idle")) for answer in answers.values()]
                least = min(idle, default=0.0) if len(idle) == self._channel.nodes else 0.0
                self._last_idle = round, time.monotonic(), least
            return {"idle": self._last_idle[2]}

    # --- each node

    def _take_note(self, sender: int, body: Body) -> Body:
        self._told(str(body["host"]), StackGroups.of_json(body["groups"]))
        return {}


def _seconds(found: object) -> float:
    """Return a value that another agent has sent, as seconds; 0 if it is no positive number."""
    return float(found) if isinstance(found, int | float) and found > 0 else 0.0


def awaited(groups: StackGroups, here: Sequence[int]) -> dict[str, Any] | None:
    """The first of the ranks that the others wait for, None if that is one of those ``here``, or is not known.

    If only hosts are known where it may be, since they gave no answer, the rank is -1.
    """
    odd = groups.odd
    if odd and not any(rank in here for group in odd for rank in group.ranks):
        return {"rank": odd[0].ranks[0], "host": odd[0].hosts[0], "place": odd[0].place, "state": odd[0].state}
    if not odd and groups.unheard:
        return {"rank": -1, "host": ", ".join(groups.unheard[:SHOWN]), "place": "", "state": "unheard"}
    return None
