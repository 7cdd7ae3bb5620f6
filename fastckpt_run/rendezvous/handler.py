"""Rendezvous handler for torch's elastic agent: nodes of a job meet, round after round, whichever of them is lost."""

import logging
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import cast

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from fastckpt._core.config import copy_of_environment
from fastckpt._core.memory.processes import Process
from fastckpt.errors import ConfigError
from fastckpt_run.rendezvous.endpoints import Endpoints
from fastckpt_run.rendezvous.first_node import WAIT, FirstNode, cut_off, is_reached, store_of_round
from fastckpt_run.rendezvous.host_drain import HostDrain
from fastckpt_run.rendezvous.job_terms import UNKNOWN
from fastckpt_run.rendezvous.keep_alive import KeepAlive
from fastckpt_run.rendezvous.meeting import Hooks, Meeting, Timing, closed_error
from fastckpt_run.rendezvous.membership import BEFORE_THE_FIRST, Master, Node, NodeLimits, Round
from fastckpt_run.rendezvous.node_admission import NodeAdmission
from fastckpt_run.rendezvous.node_links import NodeLinks
from fastckpt_run.rendezvous.referrals import Referrals, referred
from fastckpt_run.rendezvous.round_store import RoundStore
from fastckpt_run.rendezvous.round_waits import RoundWaits
from fastckpt_run.rendezvous.store_connection import StoreConnection, StoreLost, threads_end
from fastckpt_run.shutdown import given_up

logger = logging.getLogger("fastckpt.launcher")

BACKEND = "c10d"
_LOOPBACK = "127.0.0.1"
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_LOOK_ELSEWHERE = 2.0
"""Seconds between two looks of a node that waits in its own store for the others."""
_POLL = 0.02
_FAREWELL = 5.0
"""Seconds that the store's holder stays, at most, for others which have not read that the job has ended."""


class FastckptRendezvousHandler(RendezvousHandler):
    """Meets the other nodes in a TCPStore that the first living host of a list holds.

    Attributes:
        id: The name of this agent, a random word.
        calls: The number of calls of stores by their names.
        round: The last round in which this node took part, with all nodes by their group ranks.
        fault: Reason why the workers of this node failed in that round, if its host may be to blame; empty else.
        is_checked: True if this host has passed the node check before its first round.
        admission: Comparison of this node with the members of the job.
        links: Reports of nodes on the links between them, for any thread.
        domain: Failure domain of this host; empty if it is not known.
    """

    def __init__(
        self,
        job: str,
        endpoints: Endpoints,
        limits: NodeLimits,
        timing: Timing,
        *,
        local_address: str | None = None,
        secret: bytes | None = None,
        calls: Counter[str] | None = None,
    ) -> None:
        """Make a handler, which connects when it first meets the other nodes.

        Args:
            job: The name of the job: several jobs can share a store.
            endpoints: The hosts that may hold the store.
            limits: Limits on the number of nodes.
            timing: Durations of the waits.
            local_address: The address by which the other nodes reach this one; None for `Endpoints.own_address`.
            secret: The secret of the job; None for one that the store hands out.
            calls: Counter of the stores' calls, also those of `endpoints`.
        """
        self.id = secrets.token_hex(8)
        self.calls = Counter[str]() if calls is None else calls
        self.round = BEFORE_THE_FIRST
        self.fault = self.domain = ""
        self.is_checked = False
        self.admission = NodeAdmission(UNKNOWN)
        self._serves = ""
        self._seen = BEFORE_THE_FIRST
        self._job, self._given, self._limits, self._timing = job, secret, limits, timing
        self._endpoints = endpoints
        alone = limits.most + limits.spares == 1  # then no name is needed
        address = local_address or (_LOOPBACK if alone else endpoints.own_address())
        self._me = Node(self.id, socket.gethostname(), address, Process.current().to_record())
        self._alive = KeepAlive(self.id, timing.interval, timing.silence, endpoints)
        self._alive.each_look = self._announce
        self.links = NodeLinks(lambda: self._alive.store, lambda: self.round, limits, self.host_drain())
        self._referrals = Referrals(self._me, endpoints, lambda: self._alive.store)
        self._records: RoundStore | None = None
        self._master: TCPStore | None = None
        self._has_closed = False
        self._next_look = 0.0
        self.why_ended: Callable[[], str] = lambda: ""
        """Returns why this node ends the job, for the others; empty if that is not known."""
        self.before_joining: Callable[[], None] = lambda: None
        """Called before this node ends a round of others; while it lasts they train on."""
        self.parks: Callable[[Callable[[], str], bytes], None] = lambda first, secret: None
        """Called when this node begins to wait for a place: with a function for the address at which the first agent of
        the round serves others, and with the secret of the job."""

    @property
    def secret(self) -> bytes:
        """The secret that the agents of this job share."""
        return self._records.secret if self._records else b""

    def get_backend(self) -> str:
        """The name by which the handler is registered."""
        return BACKEND

    def get_run_id(self) -> str:
        """The name of the job."""
        return self._job

    @property
    def use_agent_store(self) -> bool:
        """True if workers use the store that the agent of rank 0 holds for each round."""
        return copy_of_environment().get(_OWN_STORE, "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes; returns this node's rank, and a fresh store for the round's agents and workers.

        Raises RendezvousClosedError if the job was ended, RendezvousGracefulExitError if it was while this node waited
        for a place. Raises RendezvousTimeoutError if too few nodes came, RendezvousConnectionError if no store or first
        node can be reached, ConfigError if this node does not fit the members.
        """
        self._next_look = time.monotonic() + _LOOK_ELSEWHERE
        self._master = None  # a round begins with an empty store: the last one has addresses of dead workers
        while True:
            # Each time: a node that waited for a place may have done so for hours when its store or its round is lost.
            deadline = time.monotonic() + self._timing.join
            if self._alive.is_closed:
                raise closed_error(self._alive.ending)
            try:
                info = self._take_part(self._connect(), deadline)
            except StoreLost as lost:
                # As text: a record of the error would keep the stores of all frames that it came through.
                text = "the store of the rendezvous is lost (%s); looking for one at %s"
                logger.warning(text, str(lost), self._endpoints)
                self._alive.give_up()
                continue
            except (ConfigError, RendezvousConnectionError):
                self.leave()  # alone: torch ends the job for all when this one fails
                raise
            if info is not None:
                return info

    def is_closed(self) -> bool:
        """Return whether the job was ended."""
        records = self._alive.store
        with suppress(StoreLost):
            return self._alive.is_closed or (records is not None and records.last_round().is_closed)
        return self._alive.is_closed

    @property
    def ending(self) -> str:
        """The node that has ended the job, and why, in words; empty if none has, or nothing of that is known."""
        return self._alive.ending

    def set_closed(self) -> None:
        """End the job: there is no next round."""
        records = self._alive.store
        with suppress(StoreLost):
            if records is not None and not self._has_closed:
                self._has_closed = True
                error = sys.exception()  # torch's launcher calls this while the error that ends it is raised
                why = str(error) if isinstance(error, RendezvousError) else self.why_ended()
                records.close(f"{self._me.host}{why and ': '}{why}")

    def num_nodes_waiting(self) -> int:
        """Return 1 if the round has ended, because nodes are gone or wait for a place in it. It asks no other node."""
        return int(self._alive.is_ended)

    def lost(self, ids: Iterable[str]) -> None:
        """Report nodes of the round as gone: the round ends for all, and the next one does not wait for them."""
        self._alive.lost(ids)

    def isolated(self, ids: Iterable[str]) -> None:
        """Report that this node does not reach these. Its round ends if the store is silent, too."""
        self._alive.isolated(ids)

    def is_given_up(self) -> bool:
        """True if other nodes have reported this one as gone from its last round, though it is there."""
        with suppress(StoreLost):
            return self._records is not None and self.id in self._records.gone(self.round)
        return False

    def gone_hosts(self) -> list[str]:
        """The hosts of nodes that were reported gone from the last round of this one."""
        with suppress(StoreLost):
            gone = self._records.gone(self.round) if self._records is not None else {}
            return [node.host for node in self.round.nodes if node.id in gone]
        return []

    def leave_round(self) -> None:
        """End the round for this node, as if others waited for a place in it."""
        self._alive.leave_round()

    def reach(self, agent: Process, *, parts: bool = True) -> bool:
        """Join the store in which an agent has its round, if one is reached; the next rendezvous is there.

        Until then this node is in no round, and its last one goes on without it; it holds no store. Without ``parts``
        it stays in both until then.
        """
        if parts:
            self._part()

        def rounds_of_agent(connection: StoreConnection) -> int:
            last = self._records_at(connection).last_round()
            if last.is_closed or all(Process.from_record(dict(node.process)) != agent for node in last.nodes):
                raise StoreLost("it is not the one that is looked for", ended=False)
            return last.number

        with suppress(StoreLost):
            if connection := self._endpoints.best(rounds_of_agent):
                self._part()
                self._records = self._records_at(connection)
                self.round = self._seen = BEFORE_THE_FIRST  # this half's decisions since are void
                self._alive.begin(self._records)
                return True
        return False

    def _part(self) -> None:
        """Leave the last round, and the store that its nodes have met in."""
        if (records := self._alive.pause()) is None:
            return
        with suppress(StoreLost):
            records.report_gone(self.round, [self.id], in_good_order=True)
            records.end(self.round)
        self._alive.give_up()
        records.leave()
        self._release()  # nodes in there find another one

    def ask_before_a_verdict(self, answering: Callable[[Collection[str]], frozenset[str]]) -> None:
        """Have nodes with late signs of life asked for one: those that ``answering`` returns are there."""
        self._alive.answering = answering

    def shutdown(self) -> bool:
        """End the job, and all connections; False if the store is gone."""
        self.set_closed()
        if self._endpoints.server is not None and (records := self._alive.store) is not None:
            end = time.monotonic() + _FAREWELL
            with suppress(StoreLost):
                while not records.is_end_known() and time.monotonic() < end:
                    time.sleep(_POLL)
        return self.leave()

    def leave(self) -> bool:
        """Leave the job, which goes on without waiting for this node; False if calls of a store still wait."""
        self._alive.stop()
        records = self._alive.pause()
        if records is not None:
            with suppress(StoreLost):
                if not self._has_closed and self.id in self.round.ranks:
                    records.report_gone(self.round, [self.id], in_good_order=True)
                    records.end(self.round)
            records.leave()
        self._release()
        if not (self._referrals.end(1.0) and threads_end(1.0)):
            given_up.set()
            return False
        return True

    def _release(self) -> None:
        """Release the stores that this node holds, after its own calls: torch prints calls that are cut off."""
        if self._endpoints.server is not None:
            threads_end(0.5)
        self._master = self._endpoints.server = None

    def ends_soon(self, seconds: float = 10.0) -> bool:
        """Return whether the round ends within so many seconds: a failure may be the first sign of it."""
        end = time.monotonic() + seconds
        while not self._has_ended() and time.monotonic() < end:
            time.sleep(0.05)
        return self._alive.is_ended

    def _has_ended(self) -> bool:
        return self._alive.is_ended or self._alive.is_closed

    # --- the store of the rendezvous

    def _connect(self) -> RoundStore:
        """The records of the job, in a store that answers."""
        current = self._alive.pause()
        if current is not None:
            self._records = current
            return current
        if self._records is not None:
            self._endpoints.lost(self._records.connection)
            self._records.leave()

        connection = self._endpoints.connect(self._rounds_at, self._timing.connect)
        self._records = self._records_at(connection)
        if self._endpoints.holds(connection):
            self._records.hold()
        self._alive.begin(self._records)
        self._referrals.begin()
        return self._records

    def _give_way(self) -> None:
        """Close the store that this node holds, if others have met in another one; raises StoreLost then.

        Two halves of a job that do not reach each other have a store each, and one may be too small to go on.
        """
        if self._endpoints.server is None or len(self._endpoints) == 1 or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_ELSEWHERE
        best = self._endpoints.best(self._rounds_at)
        if best is not None and self._endpoints.is_own(best) and self._records is not None:
            best.close()
            best = referred(self._records, self._endpoints, self._rounds_at)
        if best is None:
            return
        best.close()
        if not self._endpoints.is_own(best) and self._records is not None:
            logger.warning("joining the other nodes at %s:%d", best.host, best.port)
            self._records.leave()
            self._release()
            raise StoreLost("others meet elsewhere", ended=True)

    def _records_at(self, connection: StoreConnection) -> RoundStore:
        """The records of the job in a store."""
        offer = self._records.secret if self._records else None
        return RoundStore(connection, self._job, self._given, self.id, offer)

    def _rounds_at(self, connection: StoreConnection) -> int:
        return self._records_at(connection).last_round().number

    def _park(self, records: RoundStore, round: Round) -> None:
        def first() -> str:
            with suppress(StoreLost):
                return str(records.first(round).get("address", ""))
            return ""

        self.parks(first, records.secret)

    def announce_server(self, address: str) -> None:
        """Announce, as the first node of the round, where its agent serves others; empty if it does not."""
        self._serves = address
        if self._records is not None:
            with suppress(StoreLost):
                self._announce(self._records, self.round)

    def _announce(self, records: RoundStore, round: Round) -> None:
        self.links.repeat(records, round)
        if round.ranks.get(self.id) == 0 and self._limits.most + self._limits.spares > 1:
            directories = self.admission.directories()
            records.announce_first(round.name, {"address": self._serves, "directories": directories})

    def _take_part(self, records: RoundStore, deadline: float) -> RendezvousInfo | None:
        """Take part in the next round; None if it ended before this node's workers could start."""
        running, before = records.last_round(), self.round
        if not is_reached(records, before, self.id):
            self.round = BEFORE_THE_FIRST  # it does not leave in good order: the others' reports stay
            raise cut_off(self._me.address)
        if running.nodes and self.id not in running.ranks and not records.is_ended(running):
            self.before_joining()  # its nodes stop their workers for this one
        me = self._me._replace(
            fault=self.fault, is_checked=self.is_checked, terms=self.admission.terms, domain=self.domain
        )
        patience = max(self._limits.last_call, self._timing.silence)
        admits = partial(self.admission.admits, records, me, patience)
        hooks = Hooks(self._give_way, admits, partial(self._park, records))
        meeting = Meeting(records, me, self._limits, self._timing, self._alive, hooks)
        try:
            self.round = meeting.hold(self._seen, deadline)
        finally:
            self._seen = meeting.seen
        self.fault, self.is_checked, self._serves = "", False, ""
        rank = self.round.ranks[self.id]
        if rank == 0:
            self._master = store_of_round(self._me.address)
            port = self._master.port
            master = Master(self._me.address, port, port if self.use_agent_store else _free_port(), records.holder())
            records.announce(self.round, master)
        else:
            found = meeting.wait_for_master(self.round)
            if found is None:
                return None
            master = found
            follows = self.id in before.ranks and self.round.number == before.number + 1
            is_new = follows and self.round.nodes[0].id not in before.ranks
            first = FirstNode(records, self.round, master, self._limits, is_new=is_new)
            has_ended, holds_store = partial(meeting.has_ended, self.round), self._endpoints.server is not None
            store_of_first = first.reach(self._timing.interval, has_ended, holds_store=holds_store)
            if store_of_first is None:
                return None
            self._master = store_of_first
        self._alive.watch(self.round, master.holder)
        bootstrap = RendezvousStoreInfo(master.address, master.workers_port)
        store = cast(Store, RoundWaits(PrefixStore("agents", self._master), WAIT, self._has_ended))
        return RendezvousInfo(store, rank, len(self.round.nodes), bootstrap)

    def host_drain(self) -> HostDrain:
        """The means to leave hosts out of the job, for any thread."""
        return HostDrain(self._endpoints, self._limits, lambda: self._alive.store, 2.5 * self._timing.interval)


def create_handler(
    parameters: RendezvousParameters,
    *,
    secret: bytes | None,
    is_here: Callable[[str], bool],
    spares: int = 0,
    exclude_after: int = 0,
    admission: NodeAdmission | None = None,
) -> FastckptRendezvousHandler:
    """Create the handler that torchrun's options describe; raises ValueError.

    Args:
        parameters: The options, in torch's form.
        secret: The secret of the job, if the user gave one.
        is_here: Returns whether a name or an address is this host's.
        spares: Nodes that may wait, in addition to the most that take part.
        exclude_after: Failures of a host alone after which it is left out while one of them waits; 0 for any number.
        admission: Comparison of this node with the members of a job that it would join; None for none.
    """
    calls = Counter[str]()
    endpoints = Endpoints(parameters.endpoint, is_here=is_here, is_host=parameters.get_as_bool("is_host"), calls=calls)
    last_call = _seconds(parameters, "last_call_timeout", 30.0)
    made = FastckptRendezvousHandler(
        parameters.run_id,
        endpoints,
        NodeLimits(parameters.min_nodes, parameters.max_nodes, last_call, spares, exclude_after),
        Timing(
            join=_seconds(parameters, "join_timeout", 600.0),
            connect=_seconds(parameters, "read_timeout", 60.0),
            interval=(interval := _seconds(parameters, "keep_alive_interval", 0.4)),
            silence=interval * _seconds(parameters, "keep_alive_max_attempt", 5),
        ),
        local_address=parameters.local_addr,
        secret=secret,
        calls=calls,
    )
    if admission is not None:
        fewest, most = parameters.min_nodes, parameters.max_nodes
        nodes = f"{most}" if fewest == most else f"{fewest}:{most}"
        admission.terms, made.admission = replace(admission.terms, nodes=nodes), admission
    return made


def _seconds(parameters: RendezvousParameters, name: str, default: float) -> float:
    text = parameters.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{name} is {text!r} in --rdzv-conf; give a number above 0")
    return seconds


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])
