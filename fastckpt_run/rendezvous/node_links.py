"""Links between the nodes of a job: broken ones, nodes that leave for that, and nodes the job waits for."""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

from fastckpt_run.rendezvous.host_drain import DrainRefused, HostDrain
from fastckpt_run.rendezvous.membership import NodeLimits, Round, left_out_of
from fastckpt_run.rendezvous.round_store import RoundStore
from fastckpt_run.rendezvous.store_connection import StoreLost

_AGAIN = 30.0
"""Seconds until a job that could not go on without one of two nodes is asked again whether it can."""


class NodeLinks:
    """Reports of a round's agents on each other, in records of the round.

    A dead link between two agents is no reason to end a round: their workers may have another network. But if the
    workers do not go on either, the job goes on without one of the two, as if an operator had drained its host.

    Args:
        records: The records of the job; None if there is no store.
        round: The last round of this node.
        limits: Limits on the number of nodes.
        drain: Leaves hosts out.
    """

    def __init__(
        self, records: Callable[[], RoundStore | None], round: Callable[[], Round], limits: NodeLimits, drain: HostDrain
    ) -> None:
        self._records, self._round, self._limits, self._drain = records, round, limits, drain
        self._own: set[str] = set()
        self._told: tuple[object, str, frozenset[str]] | None = None
        self._refused_until = 0.0

    def report(self, ids: Iterable[str], *, undo: bool) -> None:
        """Report that nothing comes from others of the round to this node, or that messages come again."""
        ids, records, round = [*ids], self._records(), self._round()
        self._own = self._own.difference(ids) if undo else self._own.union(ids)
        if records is not None and undo:
            with suppress(StoreLost):
                for id in ids:
                    records.report_apart(round, id, undo=True)
        elif records is not None:
            self.repeat(records, round)

    def repeat(self, records: RoundStore, round: Round) -> None:
        """Report lost links that this round, or its present store, does not know."""
        own = frozenset(self._own & round.ranks.keys())
        told = weakref.ref(records), round.name, own
        if own and self._told != told:
            with suppress(StoreLost):
                for each in sorted(own):
                    records.report_apart(round, each)
                self._told = told

    def unheard(self) -> list[tuple[int, int]]:
        """Pairs of group ranks of the last round: the first receives nothing from the second."""
        round, records = self._round(), self._records()
        found = set[tuple[str, str]]()
        if records is not None:
            with suppress(StoreLost):
                found = records.apart(round)
        ranks = round.ranks
        return sorted((ranks[by], ranks[id]) for by, id in found if by in ranks and id in ranks)

    def part(self) -> str:
        """End the round if the link between two nodes is dead; the next one has no place for one of the two.

        Returns the host that leaves; empty if there is none, or the job could not go on without one.
        """
        round, records = self._round(), self._records()
        if records is None or time.monotonic() < self._refused_until or not (unheard := self.unheard()):
            return ""
        with suppress(StoreLost, DrainRefused):
            gone, waiting = records.gone(round).keys(), self._drain.waiting()
            out = left_out_of(records.drained(round), {node.host for node in round.nodes})
            away = {rank for rank, node in enumerate(round.nodes) if node.host in out or node.id in gone}
            pairs = {frozenset(pair) for pair in unheard if away.isdisjoint(pair)}
            count, holder = Counter(rank for pair in pairs for rank in pair), records.holder()
            # The node that misses most others is at fault; of two alike the lower rank stays, or the store's holder.
            for rank in sorted(count, key=lambda rank: (-count[rank], round.nodes[rank].id == holder, -rank)):
                other = next(min(pair - {rank}) for pair in pairs if rank in pair)
                with suppress(DrainRefused):
                    host, _ = self._drain.find(round.nodes[rank].host, waiting)
                    records.drain(round, host, other=round.nodes[other].host)
                    records.end(round)
                    return host
            self._refused_until = time.monotonic() + _AGAIN if pairs else 0.0
        return ""

    def awaited(self) -> str:
        """Description of the nodes that the next round waits for; empty while the last one lasts."""
        records = self._records()
        if records is None:
            return ""
        with suppress(StoreLost):
            last = records.last_round()
            if last.is_closed or (last.nodes and not records.is_ended(last)):
                return ""
            out = left_out_of(records.drained(last), {node.host for node in last.nodes})
            joined = records.all_joined(last, range(records.slots(last)))
            count = len({node.id for node in joined if node and node.host not in out})
            missing = ", ".join(node.host for node in records.missing(last) if node.host not in out)
            came = f"{count} of {self._limits.needed} nodes have come to {records.place}"
            return f"{came}, waiting for {missing}" if missing else came
        return ""
