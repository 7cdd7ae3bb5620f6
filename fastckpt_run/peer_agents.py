"""The agents of the other nodes: the members of each round, the saver's view of them, and the lost ones."""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError, RendezvousHandler

from fastckpt._core import metrics
from fastckpt._core.config import AUTO, Settings
from fastckpt._core.error_codes import coded
from fastckpt._core.memory.processes import Process
from fastckpt._core.policy.replicas.grouping import ReplicaNode, grouped
from fastckpt._core.policy.replicas.placement import place
from fastckpt._core.saver.arena_location import memory_id
from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
from fastckpt._core.saver.server import Saver
from fastckpt.errors import FastckptError
from fastckpt_run.detection.neighbor_watch import APART, ISOLATED, TOGETHER
from fastckpt_run.detection.watch_process import SENT, WatchProcess
from fastckpt_run.members import Member, drawn_secret, exchange, host_for
from fastckpt_run.rendezvous.handler import FastckptRendezvousHandler
from fastckpt_run.rendezvous.signing import secret_of

logger = logging.getLogger("fastckpt.launcher")
notices = logging.getLogger("fastckpt.report")
"""Logger for lines that are shown though nothing is wrong."""

_LOOK = 0.5
"""Seconds between two looks for the nodes that go on."""


class PeerAgents:
    """This agent among those of the other nodes, from the first round with several of them on.

    Args:
        settings: Settings of the job.
        handler: Rendezvous handler of the agents.
        saver: Serves its checkpoints to other agents, and fetches from them.
        met: Called with each round of several agents, and each that follows one.
    """

    def __init__(
        self, settings: Settings, handler: RendezvousHandler, saver: Saver, met: Callable[[PeerRound], None]
    ) -> None:
        self._settings, self._handler, self._saver, self._met = settings, handler, saver, met
        ours = handler if isinstance(handler, FastckptRendezvousHandler) else None
        domain = settings.failure_domain()
        if ours:
            ours.domain, ours.admission.arenas = domain, saver.arenas
        if ours and settings.spares:
            ours.parks = saver.prefetch.begin
        self._own = Member(
            ours.id if ours else secrets.token_hex(8),
            socket.gethostname(),
            memory_id(settings),
            launch=saver.address,
            checks=0 if settings.node_check else -1,
            replicas=settings.replicas,
            domain=domain or memory_id(settings),
        )
        self._secret = self._watched_by = b""
        self._watch: WatchProcess | None = None
        self._began = time.monotonic()
        self._members: Sequence[Member] = ()
        self._partners: str | None = None

    def meet(self, group: WorkerGroup) -> None:
        """Learn the agents of a new round, and watch them; raises as `exchange`."""
        # 1. the secret   2. listen, before others learn where   3. exchange   4. hand over to the saver, and watch
        if self._settings.spares:
            self._saver.prefetch.end()
        rank, count, own = group.group_rank or 0, group.group_world_size or 1, self._own
        store = cast(Any, group.store)  # torch annotates it as None
        if count > 1:
            host = host_for(group.master_addr or "", rank, group.spec.local_addr)
            self._secret = self._given_secret() or drawn_secret(store, rank)
            watch = self._listen(self._secret)
            own = replace(own, address=f"{host}:{self._saver.serve_peers()}", watch=f"{host}:{_port(watch.address)}")
            own = replace(own, marks=self._saver.marks())
        self._members = exchange(store, rank, count, own)
        self._own = self._members[rank]
        self._saver.slot = self._own.slot
        if self._watch is not None:  # also in a round of one that comes after one of several
            round = self._round_of(rank)
            self._saver.meet(round)
            self._met(round)
            self._watch.watch([(member.id, member.watch) for member in self._members])
            if isinstance(self._handler, FastckptRendezvousHandler):
                self._handler.ask_before_a_verdict(self._watch.answering)
        if isinstance(self._handler, FastckptRendezvousHandler) and rank == 0:
            self._handler.announce_server(self._own.address if count > 1 else "")

    def _round_of(self, rank: int) -> PeerRound:
        """The round as the saver knows it, with the partners of this agent."""
        peers = [Peer(one.id, one.memory, one.address, one.launch, one.host, one.marks) for one in self._members]
        nodes = [ReplicaNode(one.id, one.domain, tuple(one.partners)) for one in self._members]
        if size := self._settings.parity:
            group = next(group for group in grouped(nodes, size) if self._own.id in group)
            self._own = replace(self._own, partners=group)
            # Of two agents that lose their memory together none can rebuild the other's files.
            members = [peer for peer in peers if peer.id in group]
            is_possible = len({peer.memory for peer in members}) == len(members) > 1
            partners = [peer for peer in members if peer.id != self._own.id] if is_possible else []
            self._report_partners(partners, max(1, len(group) - 1), alone=False)
            return PeerRound(peers, rank, self._secret, partners, parity=True)
        placement = place(nodes, self._settings.copies)
        self._own = replace(self._own, partners=placement.partners(self._own.id))
        # Two agents on one host lose their memory together: a copy there is none.
        holders = set(placement.holders[self._own.id])
        partners = [peer for peer in peers if peer.id in holders and peer.memory != self._own.memory]
        self._report_partners(partners, self._settings.copies, alone=self._own.id in placement.inside)
        return PeerRound(peers, rank, self._secret, partners)

    def _report_partners(self, partners: Sequence[Peer], asked: int, *, alone: bool) -> None:
        names = ", ".join(f"{peer.host} ({peer.address})" for peer in partners)
        is_less = len(partners) < asked and len(self._members) > 1 and self._settings.replicas != AUTO
        if is_less and names != self._partners:
            agents, hosts = len(self._members), len({member.memory for member in self._members})
            there = str(hosts) if hosts == agents else f"{hosts} for {agents} agents"
            what = "parity" if self._settings.parity else "copy"
            text = coded("--fast-replicas %s needs %d hosts, and there are %s: %s %s is made", "FC-045")
            logger.warning(text, self._settings.replicas, asked + 1, there, "one" if partners else "no", what)
        if alone and partners and names != self._partners:
            text = coded(
                "copies of %s (%s) are on %s, also %s: no host of another failure domain has a place for them. If all "
                "of %s is lost, that costs what is not on storage",
                "FC-045",
            )
            domain = self._own.domain
            logger.warning(text, self._own.host, domain, ", ".join(peer.host for peer in partners), domain, domain)
        elif alone and not is_less and names != self._partners:
            notices.info("nobody keeps copies of what %s alone has: its agents share one host", self._own.host)
        self._partners = names

    @property
    def members(self) -> Sequence[Member]:
        """The agents of the last round, by group rank."""
        return self._members

    def checked(self) -> None:
        """Note that this node was checked with the others of the round."""
        self._own = replace(self._own, checks=self._own.checks + 1)

    def go_on_without(self, bad: Sequence[Member]) -> None:
        """Have the round end without nodes that are bad; raises FastckptError if it cannot."""
        if not isinstance(self._handler, FastckptRendezvousHandler):
            names = ", ".join(member.host for member in bad)
            raise FastckptError(
                coded(
                    f"{names} failed the node check, and a job with this rendezvous cannot go on without: start it on "
                    "other nodes, or use --rdzv-backend c10d, which can",
                    "FC-038",
                )
            )
        # The first node of those that stay reports them: one message for all.
        ids = {member.id for member in bad}
        stay = [member.id for member in self._members if member.id not in ids]
        if stay[0] == self._own.id or not self._handler.ends_soon():
            self._handler.lost(ids)

    @property
    def may_rejoin(self) -> bool:
        """True if this agent was in a round with others, which have the checkpoint directory, and can look for them."""
        has_met = isinstance(self._handler, FastckptRendezvousHandler) and self._watch is not None
        return has_met and self._saver.taken_by is not None

    def leave_round(self) -> None:
        """Have this node leave its round, since others have the checkpoint directory."""
        assert isinstance(self._handler, FastckptRendezvousHandler)
        self._handler.leave_round()

    def rejoin(self) -> None:
        """Wait, without workers, until the nodes that have the checkpoint directory are reached, or have left it.

        Raises RendezvousGracefulExitError if they have brought the job to its good end.
        """
        is_told = False
        while self.may_rejoin and (record := self._saver.taken_by) is not None:
            assert isinstance(self._handler, FastckptRendezvousHandler)
            holder = Process.from_record(dict(record.holder))
            if holder is not None and self._handler.reach(holder):
                logger.warning("joining the nodes that go on: reached %s", holder)
                return
            if self._saver.may_return():
                if self._saver.ended_elsewhere:
                    raise RendezvousGracefulExitError(f"{holder} has brought the job to its end")
                logger.warning("going on: %s has left the checkpoint directory, or is lost", holder)
                return
            if not is_told:
                text = coded("waiting without workers for %s: this node joins it when it is reached", "FC-033")
                logger.warning(text, holder)
                is_told = True
            time.sleep(_LOOK)

    def join_awaited(self) -> None:
        """Have this node join those for whom its workers wait, if they are members of this job, and are reached.

        One that is started while they are not begins a round of its own, in a store of its own.
        """
        if isinstance(self._handler, FastckptRendezvousHandler) and (record := self._saver.awaited) is not None:
            holder = Process.from_record(dict(record.holder))
            if holder is not None and self._handler.reach(holder, parts=False):
                logger.warning("joining the nodes that go on: reached %s", holder)
                self._handler.leave_round()

    def close(self) -> None:
        """Watch nobody any more; the others learn that this agent leaves."""
        if self._watch is None:
            return
        self._watch.stop()
        metrics.event(
            "node_messages",
            seconds=time.monotonic() - self._began,
            nodes=len(self._members),
            rendezvous=self._handler.calls.total() if isinstance(self._handler, FastckptRendezvousHandler) else 0,
            watch=metrics.counts[SENT],
            reports=metrics.counts["peers.reports"],
            repeats=metrics.counts["peers.repeats"],
            copies=metrics.counts["peers.copies"],
        )

    def _given_secret(self) -> bytes:
        """The secret that this agent shares with the others from the start; empty if the first has to draw one."""
        if isinstance(self._handler, FastckptRendezvousHandler):
            return self._handler.secret
        return secret_of(self._settings) or self._secret

    def _listen(self, secret: bytes) -> WatchProcess:
        if self._watch is not None and self._watched_by != secret:
            self._watch.stop()  # a store that began again has handed out another secret
            self._watch = None
        if self._watch is None:
            self._watched_by = secret
            self._watch = WatchProcess(secret, self._own.id, self._lost, self._settings.node_timeout)
        return self._watch

    def _lost(self, ids: Sequence[str], reason: str) -> None:
        """Have the round end without agents that are lost; called in the thread of the watch, which must not wait."""
        if reason in (APART, TOGETHER):
            threading.Thread(target=self._apart, args=(ids, reason), name="fastckpt-apart", daemon=True).start()
            return
        hosts = [member.host for member in self._members if member.id in ids]
        metrics.event("node_lost", nodes=hosts, reason=reason)
        if isinstance(self._handler, FastckptRendezvousHandler):
            report = self._handler.isolated if reason == ISOLATED else self._handler.lost
            threading.Thread(target=report, args=(ids,), name="fastckpt-lost", daemon=True).start()

    def _apart(self, ids: Sequence[str], reason: str) -> None:
        """Report members from which nothing comes, though they answer, or from which messages come again."""
        hosts = [member.host for member in self._members if member.id in ids]
        metrics.event("nodes_apart", host=self._own.host, hosts=hosts, undo=reason == TOGETHER)
        if reason == TOGETHER:
            logger.warning(
                "this node receives messages from %s again, or other nodes watch that host", ", ".join(hosts)
            )
        else:
            text = "this node does not hear %s, though they answer: the link between is dead, or drops large packets"
            logger.warning(coded(text, "FC-051"), ", ".join(hosts))
        if isinstance(self._handler, FastckptRendezvousHandler):
            self._handler.links.report(ids, undo=reason == TOGETHER)

    def part(self) -> None:
        """Have the job go on without one of two nodes with a dead link, since the workers do not go on.

        Nothing is done if there are none, the job needs both, or this is not the first node.
        """
        handler = self._handler
        is_first = len(self._members) > 1 and self._members[0].id == self._own.id
        if isinstance(handler, FastckptRendezvousHandler) and is_first and (host := handler.links.part()):
            text = "the workers do not go on, and %s does not hear another node: it leaves"
            logger.warning(coded(text, "FC-051"), host)


def _port(address: str) -> str:
    return address.rpartition(":")[2]
