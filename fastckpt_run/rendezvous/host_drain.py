"""Drain of hosts: an operator has the job go on without one, and takes it back in."""

import time
from collections.abc import Callable, Collection, Sequence

from fastckpt._core.policy.hosts.host_drain import named, refusal
from fastckpt.errors import FastckptError
from fastckpt_run.rendezvous.endpoints import Endpoints, addresses_of
from fastckpt_run.rendezvous.membership import Node, NodeLimits, Round, left_out_of
from fastckpt_run.rendezvous.round_store import RoundStore
from fastckpt_run.rendezvous.store_connection import StoreLost

_NEXT_ROUND = 60.0
"""Seconds for the round that follows to be complete."""
_LOOK = 0.1


class DrainRefused(FastckptError):
    """A host is not drained, or not taken back in."""


class HostDrain:
    """Leaves hosts out of the rounds of a job, until they are taken back in.

    A request is a record of the round that it ends. The node that decides on the next one leaves the host out, and
    records that in it, as in each that follows: it outlives the store, and the agent that was asked.

    Args:
        endpoints: The hosts that may hold the store.
        limits: Limits on the number of nodes.
        records: The records of the job; None if there is no store.
        sign: Seconds within which a node that lives gives a sign of life.
    """

    def __init__(
        self, endpoints: Endpoints, limits: NodeLimits, records: Callable[[], RoundStore | None], sign: float
    ) -> None:
        self._endpoints, self._limits, self._records, self._sign = endpoints, limits, records, sign

    def find(self, name: str, waiting: Sequence[Node] | None = None) -> tuple[str, bool]:
        """The host of a name or an address, and whether it is drained already.

        Raises DrainRefused if there is none, or the job cannot go on without it.

        Args:
            name: The name or the address.
            waiting: Last result of `waiting`.
        """
        records, last = self._last()
        try:
            waiting = self._alive(records, last) if waiting is None else waiting
            drained, holder = records.drained(last), records.holder()
        except StoreLost as lost:
            raise _unknown(lost) from lost
        nodes = [*last.nodes, *waiting]
        host = _host_of(name, nodes, {*drained, *last.faults})
        if drained.get(host) == "":
            return host, True
        if all(node.host != host for node in nodes) and host in last.faults:
            return host, False  # it was lost a while ago, and may come back
        if all(node.host != host for node in nodes):
            raise DrainRefused(f"no node of the job is on {name}; there are: {named([node.host for node in nodes])}")
        own = [node for node in nodes if node.host == host]
        has_store = any(node.id == holder for node in own)
        stores = [_host_of(place, own) for place, _, _ in self._endpoints.places()] if has_store else []
        out = left_out_of({**drained, host: ""}, {node.host for node in last.nodes})
        spares = [node.host for node in waiting if node.host not in out]
        if why := refusal(host, [node.host for node in last.nodes], spares, self._limits.fewest, stores):
            raise DrainRefused(f"{host} is not drained: {why}")
        return host, False

    def waiting(self) -> list[Node]:
        """The nodes that wait for a place, and give signs of life; raises StoreLost, or DrainRefused."""
        return self._alive(*self._last())

    def leave_out(self, host: str) -> Round:
        """Have the job go on without a host; the round that does. Raises DrainRefused if none comes in time."""
        _, last = self._last()
        return self._ask(host, undo=False, ends=any(node.host == host for node in last.nodes))

    def take_back(self, name: str) -> tuple[str, bool]:
        """Have the job take a host back in, and whether it takes part now. Raises DrainRefused if it is not drained."""
        records, last = self._last()
        try:
            waiting, drained = self._alive(records, last), records.drained(last)
        except StoreLost as lost:
            raise _unknown(lost) from lost
        host = _host_of(name, waiting, drained)
        if host not in drained:
            raise DrainRefused(f"{name} is not drained; drained are: {named(drained)}")
        has_place = any(node.host == host for node in waiting) and len(last.nodes) < self._limits.most
        now = self._ask(host, undo=True, ends=has_place)
        return host, any(node.host == host for node in now.nodes)

    def _ask(self, host: str, *, undo: bool, ends: bool) -> Round:
        """Leave a request in the last round, and end it if ``ends``; the round that follows it then."""
        end = time.monotonic() + _NEXT_ROUND
        while time.monotonic() < end:
            try:
                if (records := self._records()) is None:
                    raise StoreLost("the agent looks for another one", ended=False)
                last = records.last_round()
                drained = records.drained(last)
                if host in drained if undo else drained.get(host) != "":
                    records.drain(last, host, undo=undo)
                if ends:
                    records.end(last)
                while ends and records.last_round().name == last.name and time.monotonic() < end:
                    time.sleep(_LOOK)
                now = records.last_round()
            except StoreLost:  # it has gone with its host: the agent finds another one
                time.sleep(_LOOK)
                continue
            # A round that was decided on before it could read the request has left it behind.
            if (now.name == last.name and not ends) or (now.name != last.name and (host in now.drained) != undo):
                return now
        raise DrainRefused(
            f"the job has not begun another round within {_NEXT_ROUND:g} s: see which nodes its log waits for. {host} "
            f"is {'taken back in' if undo else 'left out'} when it does"
        )

    def _last(self) -> tuple[RoundStore, Round]:
        records = self._records()
        if records is None:
            raise DrainRefused("the rendezvous of the job has no store now: try again")
        try:
            return records, records.last_round()
        except StoreLost as lost:
            raise _unknown(lost) from lost

    def _alive(self, records: RoundStore, last: Round) -> list[Node]:
        """The nodes that wait for a place, and give signs of life."""
        if not (waiting := records.waiting(last)):
            return []
        ids = [node.id for node in waiting]
        before = records.beats(ids)
        time.sleep(self._sign)
        now = records.beats(ids)
        return [node for node in waiting if now.get(node.id, 0) > before.get(node.id, 0)]


def _host_of(name: str, nodes: Sequence[Node], known: Collection[str] = ()) -> str:
    """The host of a name or an address: of one of these nodes, or one that is ``known``; else the name itself."""
    if name in known or any(name == node.host for node in nodes):
        return name
    by_address = {node.address: node.host for node in reversed(nodes)}
    return next((by_address[each] for each in (name, *addresses_of(name)) if each in by_address), name)


def _unknown(lost: StoreLost) -> DrainRefused:
    return DrainRefused(f"the store of the rendezvous does not answer ({lost}): try again")
