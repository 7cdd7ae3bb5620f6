"""Meeting of the nodes for one round: each takes a place, one of them decides, all read the decision."""

import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from fastckpt._core import metrics
from fastckpt._core.error_codes import coded
from fastckpt._core.policy.hosts.host_exclusion import HostFaults
from fastckpt_run.rendezvous.job_terms import UNKNOWN
from fastckpt_run.rendezvous.keep_alive import KeepAlive
from fastckpt_run.rendezvous.membership import (
    BEFORE_THE_FIRST,
    Master,
    Node,
    NodeLimits,
    Round,
    assign_ranks,
    collect_faults,
    fitting,
    is_complete,
    leave_out,
    left_out_of,
    terms_of,
)
from fastckpt_run.rendezvous.round_store import RoundStore

logger = logging.getLogger("fastckpt.launcher")

_POLL = 0.05
FIRST_REPORT = 5.0
NEXT_REPORT = 60.0
"""Seconds between two lines that name the nodes which are waited for."""
_ALIKE = "--nnodes, --rdzv-id, --rdzv-endpoint and secret"
"""Options that agents which do not find each other may have given differently."""
_HOLE = 1.0
"""Seconds that a place may be taken without a record; its node has died in between."""


@dataclass(frozen=True)
class Timing:
    """Seconds.

    Attributes:
        join: Longest wait of a node for enough others.
        connect: Longest wait for a store.
        interval: From one sign of life to the next.
        silence: Without a sign of life, after which a node counts as gone.
    """

    join: float = 600.0
    connect: float = 60.0
    interval: float = 0.4
    silence: float = 2.0


class Hooks(NamedTuple):
    """Calls from a meeting.

    Attributes:
        stay: Called while the meeting lasts; it raises StoreLost if another store takes precedence.
        admits: Returns whether this node may come to the round after the last one by now; it raises if it never may.
        parks: Called when this node begins to wait for a place in a round that has none.
    """

    stay: Callable[[], None]
    admits: Callable[[Round], bool]
    parks: Callable[[Round], None]


class Meeting:
    """The way of one node into a round.

    The node with the first place decides. While it lives the others wait for their bells; if it gives no sign of life,
    the next one decides. A store replaces the last round by the next one atomically, so two that decide do no harm.
    """

    def __init__(
        self,
        records: RoundStore,
        node: Node,
        limits: NodeLimits,
        timing: Timing,
        keep_alive: KeepAlive,
        hooks: Hooks,
    ) -> None:
        """Begin a meeting.

        Attributes:
            seen: The newest round that this node has seen, whether it took part in it or waited for a place.
        """
        self._records = records
        self._me = node
        self._limits = limits
        self._timing = timing
        self._alive = keep_alive
        self._hooks = hooks
        self._deadline = 0.0
        self._nodes: dict[int, Node] = {}
        self._holes: dict[int, float] = {}
        self._gone = self._left = frozenset[str]()
        self._drained: Mapping[str, str] = {}
        self._looked = self._came = 0.0
        self._fewest_since: float | None = None
        self._silent_since: dict[str, float] = {}
        self.seen = BEFORE_THE_FIRST

    def hold(self, mine: Round, deadline: float) -> Round:
        """Take part in the round that follows ``mine``, or that of the others; returns the next one with this node.

        Raises RendezvousClosedError, RendezvousGracefulExitError, RendezvousTimeoutError at the ``deadline`` on the
        monotonic clock, StoreLost, or ConfigError if it does not fit the members.
        """
        self._deadline = deadline
        # A node that waits for a place brings the round along, too. In a store that others have not reached yet,
        # nodes that wait would take themselves for a first round, and begin the job once more.
        self.seen = mine
        self.seen = self._records.carry_over(mine)
        while self._me.id not in (now := self._join(self.seen)).ranks:
            self.seen = now
        self.seen = now
        return now

    def wait_for_master(self, round: Round) -> Master | None:
        """The place where a round meets; None if the round ended before it was announced."""
        while (master := self._records.master(round)) is None:
            if not self._rung_within(self._timing.interval) and self.has_ended(round):
                return None
        return master

    def has_ended(self, round: Round) -> bool:
        """Return whether a round has ended, perhaps because its first node is found to be gone just now."""
        if self._is_silent(round.nodes[0]):
            self._records.report_gone(round, [round.nodes[0].id])
            self._records.end(round)
        return self._records.is_ended(round) or self._records.last_round().is_closed

    def _join(self, last: Round) -> Round:
        """Join the round after ``last``, and wait for it; returns another one if that came meanwhile."""
        records = self._records
        _check_open(last, waits=False)
        # Before the node leaves anything in the store: else the members would stop their workers for it.
        while not self._hooks.admits(last):
            self._hooks.stay()
            self._rung_within(self._timing.interval)
            self._deadline = time.monotonic() + self._timing.join
            _check_open(now := records.last_round(), waits=True)
            if now.name != last.name:
                return now
        self._nodes, self._holes, self._fewest_since = {}, {}, None
        self._gone, self._left = self._known_gone(last), frozenset[str]()
        # One that is drained ends no round: it would be left out of the next one, too.
        drained = records.drained(last) if last.nodes and self._me.id not in last.ranks else {}
        is_drained = self._me.host in left_out_of(drained, {node.host for node in last.nodes})
        waits = is_drained or not self._end(last)
        mine, begin = records.join(last, self._me), time.monotonic()
        if is_drained:
            other = drained[self._me.host]
            why = f", as it and {other} do not reach each other" if other else ""
            text = "this host is drained%s: it waits until somebody takes it back in (fastckpt drain --undo %s)"
            logger.warning(text, why, self._me.host)
        elif waits:
            self._hooks.parks(last)
        if mine + 1 == max(len(last.nodes), self._limits.fewest) and (first := records.joined(last, 0)):
            records.ring([first.id])  # before that, the round would hardly be complete
        with metrics.phase("rendezvous.wait"):
            return self._wait_for_round(last, mine, begin, waits=waits)

    def _wait_for_round(self, last: Round, mine: int, begin: float, *, waits: bool) -> Round:
        """Wait for the round after ``last``, in which this node has taken a place."""
        records, decides, has_place = self._records, mine == 0, not waits
        report_at = begin + FIRST_REPORT
        while True:
            if decides and (now := self._decide(last)):
                return now
            if waits and last.ranks.keys() <= self._gone:  # nobody is left who could make place
                waits, self._deadline = False, time.monotonic() + self._timing.join
            report_at = report_at if waits else self._watch_time(last, report_at)
            self._hooks.stay()
            rung = self._rung_within(self._pause(max(begin, self._came)) if decides else self._timing.interval)
            if rung:
                self._looked = 0.0  # all came that may: lost nodes have been reported
            if decides and not rung and time.monotonic() - self._looked < self._timing.interval:
                continue
            now = records.last_round()
            _check_open(now, waits=not has_place)
            if now.name != last.name:
                return now
            decides = decides or (not rung and self._must_decide(last, mine))

    def _watch_time(self, last: Round, report_at: float) -> float:
        """Log the nodes that are waited for, if it is time; return the next such time.

        Raises RendezvousTimeoutError at the deadline of the meeting.
        """
        now = time.monotonic()
        if now > self._deadline:
            came, needed, seconds = len(self._nodes), self._limits.needed, self._timing.join
            raise RendezvousTimeoutError(
                coded(
                    f"{came} of {needed} nodes came to {self._records.place} in {seconds:g} s. "
                    f"Start the others with the same {_ALIKE}, or give them more time "
                    "(--rdzv-conf join_timeout=SECONDS)",
                    "FC-036",
                )
            )
        if now <= report_at:
            return report_at
        _report_wait(self._records, last, self._limits, self._deadline - now)
        return report_at + NEXT_REPORT

    def _pause(self, since: float) -> float:
        """Seconds until the deciding node looks again: nodes ring when all should be there, but some may be gone."""
        pause = min(self._timing.interval, max(_POLL, (time.monotonic() - since) / 10))
        if self._fewest_since is not None:
            pause = min(pause, max(_POLL, self._fewest_since + self._limits.last_call - time.monotonic()))
        return pause

    def _end(self, last: Round) -> bool:
        """End the last round, so that its nodes come; returns False if it has no place for this one."""
        records = self._records
        if not last.nodes:
            return True
        predecessors = [node.id for node in last.nodes if node.host == self._me.host and node.is_dead_here()]
        is_full = self._me.id not in last.ranks and not predecessors and len(last.nodes) >= self._limits.most
        if is_full and not records.is_ended(last):
            what = "as a spare" if self._limits.spares else "for a place"
            logger.warning("the job has all its %d nodes: this one waits %s", len(last.nodes), what)
            metrics.event("waits_as_spare", host=self._me.host, nodes=len(last.nodes))
            return False
        # Who decides may be one that waits, and learn it from nobody else in this store.
        known = self._known_gone(last) & last.ranks.keys() if self._limits.spares else frozenset[str]()
        if known:  # by each member else, so that the deciding node would read as many lines for each loss
            known -= records.gone(last).keys()
        records.report_gone(last, [*predecessors, *sorted(known)])
        records.end(last)
        return True

    def _rung_within(self, seconds: float) -> bool:
        rung = self._alive.rung.wait(seconds)
        self._alive.rung.clear()
        return rung

    # --- the decision

    def _must_decide(self, last: Round, mine: int) -> bool:
        """Return whether no living node has an earlier place."""
        for slot in range(mine):
            node = self._node_at(last, slot)
            if node is None and not self._is_hole(slot):
                return False
            if node is not None and node.id == self._me.id:
                return True
            if node is not None and not self._is_silent(node):
                return False
        return True

    def _decide(self, last: Round) -> Round | None:
        """Read which nodes came; complete the round, and return it, if it need not wait any longer."""
        unread = [slot for slot in range(self._records.slots(last)) if slot not in self._nodes]
        for slot, node in zip(unread, self._records.all_joined(last, unread), strict=True):
            self._found(slot, node)
        pending = [slot for slot in self._holes if not self._is_hole(slot)]
        came = {node.id: node for _, node in sorted(self._nodes.items())}
        now = time.monotonic()
        if now - self._looked > self._timing.interval:
            self._look(last, came)
        out, present = self._present(last, [*came.values()])
        if len(present) < self._limits.fewest:
            self._fewest_since = None
        elif self._fewest_since is None:
            self._fewest_since = now
        since = now - self._fewest_since if self._fewest_since is not None else 0.0
        if pending or not is_complete(last, present, self._gone | out, self._limits, since):
            return None
        if (drained := self._records.drained(last)) != self._drained:  # by one that came since, and before it did
            self._drained = drained
            return self._decide(last)
        return self._conclude(last, came, present, out)

    def _conclude(
        self, last: Round, came: Mapping[str, Node], present: Sequence[Node], out: Collection[str]
    ) -> Round | None:
        """Complete the round of some nodes that are present; None if another one has completed it meanwhile."""
        faults = collect_faults(last, [*came.values()], self._gone - self._left)
        chosen, left_out = leave_out(last, present, faults, self._limits)
        nodes = assign_ranks(last, chosen, self._limits.most)
        terms, nodes = terms_of(last, nodes), tuple(node._replace(terms=UNKNOWN) for node in nodes)
        back = {node.host for node in nodes}
        drained = {host: other for host, other in self._drained.items() if not other or host not in back}
        done = Round(last.number + 1, secrets.token_hex(8), nodes, faults=faults, terms=terms, drained=drained)
        if not self._records.complete(last, done):
            return None
        _report_left_out([node for node in left_out if node.id in last.ranks], faults)
        for host in sorted({node.host for node in last.nodes if node.id in out}):
            other = self._drained[host]
            why = f"and {other} do not reach each other" if other else "is drained"
            logger.warning("host %s %s: the job goes on without it, on %d nodes", host, why, len(nodes))
            metrics.event("host_left_out", host=host, causes=[f"does not reach {other}" if other else "drained"])
        self._records.ring(node.id for node in came.values() if node.id != self._me.id)
        return done

    def _present(self, last: Round, came: Sequence[Node]) -> tuple[set[str], list[Node]]:
        """The ids of nodes on drained hosts, and of those that came the ones that may take part.

        Two that do not reach each other take part rather than none: their workers may.
        """
        for hosts in ({node.host for node in came if node.id not in self._gone}, set[str]()):
            hosts_out = left_out_of(self._drained, hosts)
            out = {node.id for node in (*last.nodes, *came) if node.host in hosts_out}
            present = fitting(last, [node for node in came if node.id not in self._gone | out])
            if len(present) >= self._limits.fewest:
                break
        return out, present

    def _look(self, last: Round, came: Collection[str]) -> None:
        """See which nodes are silent, or reported gone, and which hosts are drained."""
        self._looked = now = time.monotonic()
        ids = {*came, *last.ranks} - {self._me.id}
        silent = self._without_awaited(self._alive.silent(ids, self._records.beats(ids)), last, now)
        # A node that is there is not gone, whoever reported so; but it may have died since it came.
        reported = self._records.gone(last)
        self._left = frozenset(id for id, has_left in reported.items() if has_left)
        self._gone = (self._known_gone(last) | reported.keys()) - {*came} | silent
        self._drained = self._records.drained(last)

    def _known_gone(self, last: Round) -> frozenset[str]:
        """Nodes that this one knows to be gone; none if it had no place in the last round: it watched an older one."""
        return self._alive.gone if self._me.id in last.ranks else frozenset()

    def _without_awaited(self, silent: frozenset[str], last: Round, now: float) -> frozenset[str]:
        """Silent nodes without those of the last round for which this one waits longer, since spares could go without.

        A member that is dead is reported gone by another one. Where all are silent, as in a store that is new or slow,
        they may only be late: spares would take their ranks, and their saves in memory would be lost.
        """
        if not self._limits.spares:
            return silent
        members = silent & last.ranks.keys()
        self._silent_since = {id: self._silent_since.get(id, now) for id in members}
        return silent - {id for id in members if now - self._silent_since[id] < self._limits.last_call}

    def _node_at(self, last: Round, slot: int) -> Node | None:
        if slot not in self._nodes:
            self._found(slot, self._records.joined(last, slot))
        return self._nodes.get(slot)

    def _found(self, slot: int, node: Node | None) -> None:
        if node is None:
            self._holes.setdefault(slot, time.monotonic())
        else:
            self._holes.pop(slot, None)
            self._nodes[slot], self._came = node, time.monotonic()

    def _is_hole(self, slot: int) -> bool:
        return time.monotonic() - self._holes[slot] > _HOLE

    def _is_silent(self, node: Node) -> bool:
        return bool(self._alive.silent([node.id], self._records.beats([node.id])))


def closed_error(ending: str) -> RendezvousClosedError:
    """The error of a node after another one has ended the job."""
    return RendezvousClosedError(f"another node has ended the job{ending and ', '}{ending}")


def _report_wait(records: RoundStore, last: Round, limits: NodeLimits, left: float) -> None:
    """Log the nodes that are waited for: otherwise a wrong endpoint or --nnodes would look like a slow start."""
    came, place = records.slots(last), records.place
    if came < limits.fewest:
        text = coded(
            "%d of %s nodes have come to %s; waiting for the others, for %.0f s at most. They need the same %s",
            "FC-036",
        )
        logger.warning(text, came, limits.needed, place, left, _ALIKE)
    elif last.nodes:
        missing = ", ".join(node.host for node in records.missing(last)) or "others of the last round"
        logger.warning(coded("%d nodes have come to %s; waiting for %s", "FC-036"), came, place, missing)
    else:
        text = "%d nodes have come to %s, and up to %d may take part; waiting for more, for %.0f s at most"
        logger.warning(text, came, place, limits.most, limits.last_call)
    if drained := ", ".join(sorted(records.drained(last))):
        logger.warning("these hosts are drained, and not waited for: %s (fastckpt drain --undo HOST)", drained)


def _report_left_out(left_out: Sequence[Node], faults: HostFaults) -> None:
    for node in left_out:
        causes = list(faults[node.host])
        text = "host %s is left out while a spare waits: it failed %d times, and no other for the same cause: %s"
        logger.warning(text, node.host, len(causes), "; ".join(causes))
        metrics.event("host_left_out", host=node.host, causes=causes)


def _check_open(last: Round, *, waits: bool) -> None:
    if last.is_closed and waits:
        raise RendezvousGracefulExitError("the other nodes have ended the job")
    if last.is_closed:
        raise closed_error(last.ending)
