"""The first node of a round, at whose store the others meet: each reaches it, or leaves if it alone does not."""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from fastckpt._core.error_codes import coded
from fastckpt_run.rendezvous.membership import Master, NodeLimits, Round
from fastckpt_run.rendezvous.round_store import RoundStore
from fastckpt_run.rendezvous.store_connection import StoreLost, reached

WAIT = timedelta(seconds=60)
"""For which the agents of a round wait for each other in its store."""
_UNREACHED, _REACH = 7.0, 20.0
"""Seconds after which a node reports that it does not reach the first of its round, and after which it leaves if no
other has reported so; less than `WAIT`, for which the others wait."""


def store_of_round(address: str, port: int | None = None) -> TCPStore:
    """The store of a round, or a client of it; raises StoreLost."""
    try:
        return TCPStore(address, port or 0, is_master=port is None, wait_for_workers=False, timeout=WAIT)
    except RuntimeError as error:
        raise StoreLost(f"the store of the round at {address}: {str(error).splitlines()[0]}", ended=False) from error


class FirstNode:
    """The first node of a round, as another one sees it.

    Args:
        records: Those of the job.
        round: The round.
        master: Where the first node has announced its store.
        limits: How many nodes there may be.
    """

    def __init__(self, records: RoundStore, round: Round, master: Master, limits: NodeLimits) -> None:
        self._records, self._round, self._master, self._limits = records, round, master, limits

    def reach(self, pause: float, has_ended: Callable[[], bool], *, holds_store: bool) -> TCPStore | None:
        """The store at the first node; None if the round ended before it was reached. Raises StoreLost at last.

        Raises RendezvousConnectionError if this node alone does not reach it, though it is alive, and the others can
        go on. They could not if this one ``holds_store``, in which they meet.
        """
        begin, has_reported = time.monotonic(), False

        def goes_on() -> bool:
            nonlocal has_reported
            if has_ended():
                return False
            waited = time.monotonic() - begin
            if waited > _UNREACHED and not has_reported:
                self._records.report_unreached(self._round)
                has_reported = True
            if waited > _REACH and not holds_store and self._is_reached_by_others():
                first = f"{self._round.nodes[0].host}, at {self._master.address}:{self._master.port}"
                raise RendezvousConnectionError(
                    coded(
                        f"this node meets the others, and does not reach the first of them, {first}: they go on "
                        "without it. Look at the network between the two hosts",
                        "FC-033",
                    )
                )
            return True

        return reached(partial(store_of_round, self._master.address, self._master.port), pause, goes_on)

    def _is_reached_by_others(self) -> bool:
        """Whether this node alone does not reach it, and the others can go on without this one."""
        if self._records.unreached(self._round) > 1:
            return False  # it is the first one that is cut off
        return len(self._round.nodes) > self._limits.fewest or self._records.slots(self._round) > 0
