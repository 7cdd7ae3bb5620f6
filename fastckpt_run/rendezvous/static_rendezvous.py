"""torch's static rendezvous, that of --master-addr and --node-rank: its waits are reported, and end at a signal."""

import ipaddress
import logging
import time

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousInfo, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from fastckpt._core.error_codes import coded
from fastckpt_run.rendezvous.meeting import FIRST_REPORT, NEXT_REPORT
from fastckpt_run.rendezvous.store_connection import StoreLost, reached
from fastckpt_run.shutdown import given_up

logger = logging.getLogger("fastckpt.launcher")

_LOOK = 0.2
_SAME = "the same --nnodes, --master-addr and --master-port, and each its own --node-rank"


class StaticRendezvous(StaticTCPRendezvous):
    """Waits as torch's does, which logs nothing meanwhile, in C++, where no signal is handled."""

    _has_met = False

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes; raises RendezvousTimeoutError if they do not come, RendezvousConnectionError else."""
        if self._has_met:  # then torch returns the same store at once
            return super().next_rendezvous()
        begin = time.monotonic()
        report_at = begin + FIRST_REPORT

        def goes_on() -> bool:
            nonlocal report_at
            if time.monotonic() > report_at:
                report_at += NEXT_REPORT
                self._report_wait(begin + self.timeout.total_seconds() - time.monotonic())
            return True

        try:
            found = reached(self._connect, _LOOK, goes_on)
        except StoreLost as lost:
            raise self._error(lost, time.monotonic() - begin) from None
        except BaseException:
            given_up.set()  # Python would end while the thread waits in C++
            raise
        assert found is not None
        self._has_met = True
        return found

    def _connect(self) -> RendezvousInfo:
        try:
            return super().next_rendezvous()
        except RuntimeError as error:  # the base of torch's errors about stores
            raise StoreLost(str(error).splitlines()[0], ended=False) from error

    def _report_wait(self, left: float) -> None:
        if self.rank:
            text = (
                "this node does not reach the one of --node-rank 0 at %s:%d; trying for %.0f s at most. They need %s%s"
            )
            logger.warning(coded(text, "FC-036"), self.master_addr, self.master_port, left, _SAME, self._only_here())
        else:
            text = "this node waits at %s:%d for the other nodes of --nnodes %d, for %.0f s at most. They need %s%s"
            place = self.master_addr, self.master_port, self.world_size
            logger.warning(coded(text, "FC-036"), *place, left, _SAME, self._only_here())

    def _only_here(self) -> str:
        """Return a hint for the case that no other host can reach the address: it is the default."""
        try:
            is_loopback = self.master_addr == "localhost" or ipaddress.ip_address(self.master_addr).is_loopback
        except ValueError:  # a name
            is_loopback = False
        return (
            f". No other host reaches {self.master_addr}: name the first one with --master-addr" if is_loopback else ""
        )

    def _error(self, lost: StoreLost, waited: float) -> Exception:
        place, limit = f"{self.master_addr}:{self.master_port}", self.timeout.total_seconds()
        if waited < limit:
            text = f"the first node cannot hold its store at {place}, or is not reached there: {lost}"
            return RendezvousConnectionError(coded(text, "FC-037"))
        return RendezvousTimeoutError(
            coded(
                f"not all of {self.world_size} nodes came to {place} in {limit:g} s: {lost} Start the others with "
                f"{_SAME}, or give them more time (--rdzv-conf timeout=SECONDS){self._only_here()}",
                "FC-036",
            )
        )
