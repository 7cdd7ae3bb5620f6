"""The first node of a round, which has the store: each other node reaches it, or one of both leaves."""

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from fastckpt._core.error_codes import coded
from fastckpt_run.rendezvous.membership import Master, NodeLimits, Round
from fastckpt_run.rendezvous.round_store import RoundStore
from fastckpt_run.rendezvous.store_connection import StoreLost, reached

logger = logging.getLogger("fastckpt.launcher")

WAIT = timedelta(seconds=60)
"""Maximum wait of a round's agents for each other in its store."""
_UNREACHED, _REACH = 7.0, 20.0
"""Seconds after which a node reports that it does not reach the first of its round, and after which it leaves if no
other has reported so. Less than `WAIT`, for which the others wait."""
_SEVERAL = 2
"""Nodes, of many half of them, that do not reach a first one that is new: then the round ends without it."""
_NOT_REACHED, _IS_REACHED, _CUT_OFF = "unreached", "reached", "cut off"
"""Reports of nodes on a first one: they do not reach it; they reach it; the round has ended without it."""
_PAUSE = 1.0
"""Seconds from one attempt to reach it to the next, where it fails at once."""


def store_of_round(address: str, port: int | None = None) -> TCPStore:
    """The store of a round, or a client of it; raises StoreLost."""
    try:
        return TCPStore(address, port or 0, is_master=port is None, wait_for_workers=False, timeout=WAIT)
    except RuntimeError as error:
        raise StoreLost(f"the store of the round at {address}: {str(error).splitlines()[0]}", ended=False) from error


class FirstNode:
    """The first node of a round, as another one sees it.

    Args:
        records: Records of the job.
        round: The round.
        master: Address that the first node has announced for its store.
        limits: Limits on the number of nodes.
        is_new: True if it has come in the place of the one before, and nobody of the others has reached it yet.
    """

    def __init__(
        self, records: RoundStore, round: Round, master: Master, limits: NodeLimits, *, is_new: bool = False
    ) -> None:
        self._records, self._round, self._master, self._limits = records, round, master, limits
        self._is_new = is_new
        self._is_over = threading.Event()

    def reach(self, pause: float, has_ended: Callable[[], bool], *, holds_store: bool) -> TCPStore | None:
        """The store at the first node; None if the round ended before it was reached. Raises StoreLost at last.

        The round ends without the first node if that is new, and several others do not reach it, or the only other
        one. Raises RendezvousConnectionError if this node alone does not reach it, though it is alive, and the others
        can go on. They could not if this one ``holds_store``, in which they meet.
        """
        begin, has_reported = time.monotonic(), False

        def goes_on() -> bool:
            nonlocal has_reported
            if has_ended():
                return False
            waited = time.monotonic() - begin
            if waited > _UNREACHED and not has_reported:
                self._records.report(self._round, _NOT_REACHED)
                has_reported = True
            if has_reported and self._is_reached_by_nobody():
                logger.warning(
                    coded("the round ends: %d nodes do not reach its first one, %s, which came last", "FC-033"),
                    self._records.reports(self._round, _NOT_REACHED),
                    self._where,
                )
                self._records.report(self._round, _CUT_OFF)
                self._records.report_gone(self._round, [self._round.nodes[0].id])
                self._records.end(self._round)
                return False
            if waited > _REACH and not holds_store and self._is_reached_by_others():
                raise RendezvousConnectionError(
                    coded(
                        f"this node meets the others, and does not reach the first of them, {self._where}: they go on "
                        "without it. Look at the network between the two hosts",
                        "FC-033",
                    )
                )
            return True

        try:
            found = reached(self._connected, pause, goes_on)
        finally:
            self._is_over.set()
        if found is not None and self._is_new:
            self._records.report(self._round, _IS_REACHED)
        return found

    @property
    def _where(self) -> str:
        return f"{self._round.nodes[0].host}, at {self._master.address}:{self._master.port}"

    def _connected(self) -> TCPStore:
        """A client of its store, which may not be there for a moment; raises StoreLost after `WAIT`."""
        end = time.monotonic() + WAIT.total_seconds()
        while True:
            try:
                return store_of_round(self._master.address, self._master.port)
            except StoreLost as lost:
                if time.monotonic() > end or self._is_over.wait(_PAUSE):
                    raise StoreLost(f"{self._round.nodes[0].host}, {lost}", ended=False) from lost

    def _is_reached_by_nobody(self) -> bool:
        """Return whether it is rather the first one that is cut off, which has replaced one that was reached."""
        if not self._is_new:
            return False
        others, unreached = len(self._round.nodes) - 1, self._records.reports(self._round, _NOT_REACHED)
        # Those that have reached it since have reported both: names may be slow to resolve.
        is_most = unreached > 2 * self._records.reports(self._round, _IS_REACHED)
        return is_most and unreached >= min(others, max(_SEVERAL, others // 2))

    def _is_reached_by_others(self) -> bool:
        """Return whether only this node does not reach it, and the others can go on without this one."""
        if self._records.reports(self._round, _NOT_REACHED) > 1:
            return False  # it is the first one that is cut off
        drained = self._round.drained
        return len(self._round.nodes) > self._limits.fewest or any(
            node.host not in drained for node in self._records.waiting(self._round)
        )


def is_reached(records: RoundStore, last: Round, id: str) -> bool:
    """Return False if the others have ended a round because they did not reach this node, the first one."""
    return last.ranks.get(id) != 0 or not records.reports(last, _CUT_OFF)


def cut_off(address: str) -> RendezvousConnectionError:
    """The error of a first node that the others do not reach."""
    text = (
        f"the other nodes do not reach this one, the first of their round, at {address}: they go on without it. Let "
        "them connect to all ports of this host, or name an address that they reach (--local-addr)"
    )
    return RendezvousConnectionError(coded(text, "FC-033"))
