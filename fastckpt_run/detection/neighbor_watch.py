"""The watch over other agents: each follows the next three in a ring, and all learn of one that is lost."""

import asyncio
import itertools
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastckpt._core.error_codes import coded
from fastckpt_run.detection.apart_members import ApartMembers
from fastckpt_run.detection.authenticated_link import AuthenticatedLink, ForgedMessage, Purpose
from fastckpt_run.detection.probes import ASK, MEMBER, PAUSE, PROBE, STATE, State, state_by, state_of
from fastckpt_run.detection.reception import Reception

logger = logging.getLogger("fastckpt.launcher")

NEIGHBORS = 3
"""Members that each member follows."""
HELPERS = 3
"""Other members that are asked to probe one that is suspected."""
BEAT = 0.5
"""Seconds between two heartbeats on a connection, at most: with `NEIGHBORS` followers 6 messages a second."""
BEATS = 4
"""Heartbeats in a timeout, at least: a member is suspected when three are missing."""
SILENCE = 0.75
"""Part of the timeout for which a member is silent before it is suspected; in the rest it may refute that."""
HEARSAY = 0.6
"""Part of the time to refute a suspicion in which another member probes the one that is suspected."""
CERTAIN = (State.FROZEN, State.GONE, State.STARVED)
"""Findings of one probe that count for a member that others do not reach, in the order in which they count."""
PATIENCE = 4.0
"""Times the timeout that a member may be silent while its host's kernel accepts connections: it may lack a core."""
TICK = 0.1
"""Seconds between two looks for silent members."""
STALL = 0.2
"""Seconds by which a look may be late; beyond that this process did not run, and others were not silent."""
ISOLATED = "isolated: most neighbours of this node do not answer; they are lost, or its own link is down"
APART = "apart: this node does not hear it, though it answers"
TOGETHER = "together: this node hears it again"
PADDING = 3000
"""Bytes of some messages, more than a packet has: a link that drops large packets drops these."""
PADDED = 20
"""Heartbeats of which one is padded, and the first."""

WATCH = "watch"
_KIND, _REASON, _PADDING = "kind", "reason", "padding"
_BEAT, _LOST, _LEAVES, _FOLLOWS = "beat", "lost", "leaves", "follows"
OnLost = Callable[[Sequence[str], str], None]


class NeighborWatch:
    """Watches the other agents of a job, in a thread of its own, and has them watch this one.

    A member sends heartbeats to those that follow it. One that closes its connection, or is silent, is suspected: its
    follower and three others probe it by new connections. If it answers none of them until the timeout, it is reported
    to all members, each of which passes that on once. One that answers, but from which nothing comes, is apart from
    this member: the link between the two is dead, or drops large packets.

    Args:
        secret: Of the job; a peer without it is refused.
        own_id: The id of this member.
        on_lost: Called once for each loss with the ids of the members and the reason, in the watch's thread: it must
            not wait. A member may learn that others take it for lost. With `ISOLATED` as the reason, the members are
            those that this node does not reach. With `APART`, they answer, but nothing comes from them; `TOGETHER`
            reports that this has ended, or that they are not watched any more. These two reasons are not reported to
            other members.
        timeout: Seconds from a member's last sign of life to the report.
        listener: A socket that listens; see `listener.listen`.
        is_stopped: Returns whether the agent that this member stands for is stopped by a signal, and so no member now.

    Attributes:
        address: Address at which this member is watched, as ``host:port``.
        sent: Messages that this member has sent.
    """

    # All that follows runs in the loop of the thread, but for `watch` and `stop`.

    def __init__(
        self,
        secret: bytes,
        own_id: str,
        on_lost: OnLost,
        timeout: float,
        listener: socket.socket,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._secret, self._own, self._on_lost, self._is_stopped = secret, own_id, on_lost, is_stopped
        self._silence, self._refute, self._patience = SILENCE * timeout, (1 - SILENCE) * timeout, PATIENCE * timeout
        self._interval = min(BEAT, timeout / BEATS)
        self._members: dict[str, str] = {}
        self._heard: dict[str, float] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._judging: dict[str, asyncio.Task[None]] = {}
        self._gone: set[str] = set()
        self._reached: set[str] = set()
        self._apart = ApartMembers()
        self._links: set[AuthenticatedLink] = set()
        self._served: dict[str, AuthenticatedLink] = {}
        self._stalls = self.sent = 0
        self._is_isolated = False
        self._reception = Reception(secret, own_id, self._serve, listener)
        self.address = self._reception.address
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fastckpt-neighbors", daemon=True)
        self._thread.start()

    def watch(self, members: Sequence[tuple[str, str]]) -> None:
        """Watch these members from now on, each an id and ``host:port``; all are given the same, in the same order."""
        self._loop.call_soon_threadsafe(self._begin, dict(members))

    def answers(self, member: str) -> bool:
        """Probe a member that is watched; return whether it answers, or at least its host's kernel does."""
        if not (address := self._members.get(member)):
            return False
        probe = state_of(address, self._secret, self._own, member, self._refute)
        return asyncio.run_coroutine_threadsafe(probe, self._loop).result() in (State.ALIVE, State.STARVED)

    def stop(self) -> None:
        """Leave, so that nobody suspects this member, and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        await self._reception.open()
        ticks = asyncio.create_task(self._tick())
        await self._ended.wait()
        ticks.cancel()
        await self._send_all({_KIND: _LEAVES, MEMBER: self._own})
        await asyncio.gather(*self._end_round(), return_exceptions=True)
        await self._reception.close()
        await asyncio.sleep(PAUSE)  # sockets are closed in later turns

    def _end_round(self) -> list[asyncio.Task[None]]:
        tasks = [*self._following.values(), *self._judging.values()]
        for task in tasks:
            task.cancel()
        self._following, self._judging = {}, {}
        return tasks

    def _begin(self, members: dict[str, str]) -> None:
        self._end_round()
        self._members, self._gone, self._is_isolated = members, set(), False
        self._reached &= members.keys()
        self._heard.clear()
        self._follow_next()

    def _others(self) -> list[str]:
        """The other members that are not gone, in the order of the ring, from the next one on."""
        ring = [*self._members]
        at = ring.index(self._own) if self._own in self._members else len(ring)
        return [each for each in ring[at + 1 :] + ring[:at] if each not in self._gone]

    def _follow_next(self) -> None:
        following = self._others()[:NEIGHBORS]
        for member in {*self._following} - {*following}:
            self._following.pop(member).cancel()
        for member in following:
            if member not in self._following:
                self._heard[member] = time.monotonic()
                self._following[member] = asyncio.create_task(self._follow(member))
        if unwatched := self._apart.keep(self._following):
            self._on_lost(unwatched, TOGETHER)

    async def _follow(self, member: str) -> None:
        """Receive a member's heartbeats, over one connection after the other."""
        address, purpose = self._members[member], Purpose(WATCH, self._own, member)
        while True:
            try:
                async with asyncio.timeout(self._silence):
                    link = await AuthenticatedLink.open(address, self._secret, purpose)
                try:
                    await self._send(link, {_KIND: _FOLLOWS, _PADDING: PADDING * " "})
                    await self._receive(link, member)
                finally:
                    link.close()
            except ForgedMessage as error:
                self._reception.refuse(address, error)
            except ConnectionError as error:
                self._suspect(member, f"has closed its connection, or refuses one ({error})")
            except OSError as error:  # it is silent, which the next look finds
                logger.debug("node %s: %s", member, error)
            await asyncio.sleep(PAUSE)

    async def _receive(self, link: AuthenticatedLink, member: str) -> None:
        """Receive messages over a link; raises OSError when that is closed."""
        self._links.add(link)
        try:
            while True:
                self._heard[member] = time.monotonic()
                self._handle(await link.receive(), member)
                self._reached.add(member)
                if self._apart.hears(member):
                    self._on_lost([member], TOGETHER)
        finally:
            self._links.discard(link)

    def _handle(self, body: dict[str, Any], sender: str) -> None:
        kind, member = body.get(_KIND), body.get(MEMBER)
        if kind == _LOST and isinstance(member, str):
            self._report(member, str(body.get(_REASON)))
        elif kind == _LEAVES and member == sender:
            self._gone.add(sender)
            self._follow_next()

    async def _serve(self, link: AuthenticatedLink, purpose: Purpose) -> None:
        """Answer a member that has connected."""
        if purpose.kind == PROBE:
            await self._send(link, {STATE: State.FROZEN if self._is_stopped() else State.ALIVE})
        elif purpose.kind == WATCH:
            await self._serve_follower(link, purpose.sender)
        elif purpose.kind == ASK:
            async with asyncio.timeout(2 * self._refute):
                member = (await link.receive()).get(MEMBER)
                if address := self._members.get(str(member)):
                    state = await state_of(address, self._secret, self._own, str(member), HEARSAY * self._refute)
                    await self._send(link, {STATE: state})

    async def _serve_follower(self, link: AuthenticatedLink, follower: str) -> None:
        """Send heartbeats over the newest connection of a follower: the end of a stuck one is never reported."""
        if before := self._served.get(follower):
            before.close()
        self._served[follower] = link
        beats: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(self._silence):
                self._handle(await link.receive(), follower)
            beats = asyncio.create_task(self._beat(link))
            await self._receive(link, follower)
        finally:
            if beats is not None:
                beats.cancel()
            if self._served.get(follower) is link:
                del self._served[follower]

    async def _beat(self, link: AuthenticatedLink) -> None:
        for number in itertools.count():
            if not self._is_stopped():
                padding = {} if number % PADDED else {_PADDING: PADDING * " "}
                await self._send(link, {_KIND: _BEAT, **padding})
            await asyncio.sleep(self._interval)

    async def _send(self, link: AuthenticatedLink, body: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._refute):
                await link.send(body)
            self.sent += 1
        except OSError as error:  # whoever receives from this link finds out
            logger.debug("a message was not sent: %s", error)

    async def _send_all(self, body: dict[str, Any]) -> None:
        await asyncio.gather(*(self._send(link, body) for link in self._links))

    async def _tick(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK)
            last, before = time.monotonic(), last
            if (late := last - before - TICK) > STALL:
                # This process did not run, or this thread: it could receive nothing.
                self._stalls += 1
                self._heard = {member: min(last, heard + late) for member, heard in self._heard.items()}
            for member in [*self._following]:
                if (silent := last - self._heard[member]) > self._silence:
                    self._suspect(member, f"has been silent for {silent:.1f} s")

    def _suspect(self, member: str, why: str) -> None:
        if member not in self._following or member in self._judging or self._is_isolated:
            return
        if self._apart.is_unheard(member) and time.monotonic() - self._heard[member] < self._silence:
            return  # it has just answered others
        judging = self._judging  # of this round
        judging[member] = task = asyncio.create_task(self._judge(member, why))
        task.add_done_callback(lambda _: judging.pop(member, None))

    async def _judge(self, member: str, why: str) -> None:
        # 1. probe it, and have others probe it   2. one answer refutes the suspicion   3. is it this node's own link?
        # 4. report it
        stalls, others = self._stalls, [each for each in self._others() if each not in self._judging]
        helpers = sorted(others, key=lambda each: each in self._following)[:HELPERS]
        own = state_of(self._members[member], self._secret, self._own, member, self._refute)
        tasks = [asyncio.create_task(each) for each in (own, *(self._ask(helper, member) for helper in helpers))]
        if await _one_answers(tasks):
            self._answers(member, why)
            return
        if member in self._gone or self._is_isolated:
            return
        if member not in self._reached:  # behind a firewall silence means nothing
            logger.warning("node %s %s: it was never reached, so it cannot be watched", member, why)
            self._heard[member] = math.inf
            return
        if stalls != self._stalls:  # this process may not have received the answers
            self._heard[member] = time.monotonic()
            return
        results = [task.result() for task in tasks]
        silent_helpers = {helper for helper, state in zip(helpers, results[1:], strict=True) if state is None}
        state = next((each for each in CERTAIN if each in results), State.UNREACHABLE)
        if state is State.STARVED and time.monotonic() - self._heard[member] < self._patience:
            await asyncio.sleep(self._silence)  # probes fill the queue of the socket, which then accepts no more
            return
        if state is State.UNREACHABLE and (unreached := self._cut_off(member, helpers, silent_helpers)):
            self._is_isolated = True
            logger.error(coded("%s; it does not reach %s", "FC-033"), ISOLATED, ", ".join(unreached))
            self._on_lost(unreached, ISOLATED)
            return
        self._report(member, f"it {why}; {state}")

    def _answers(self, member: str, why: str) -> None:
        """Note that a member from which nothing came answers this one, or another."""
        heard = self._heard[member]
        if self._apart.answers(member, heard):
            self._on_lost([member], APART)
        elif member not in self._apart.now:
            logger.info("node %s %s, but answers: it is not lost", member, why)
        self._heard[member] = time.monotonic()
        # A stuck connection would deliver messages long after the link is mended.
        if member in self._following and time.monotonic() - heard >= self._silence:
            self._following.pop(member).cancel()
            self._follow_next()

    def _ask(self, helper: str, member: str) -> Coroutine[None, None, State | None]:
        self.sent += 1
        return state_by(self._members[helper], helper, self._secret, self._own, member, self._refute)

    def _cut_off(self, member: str, helpers: Sequence[str], silent: set[str]) -> list[str]:
        """The members that this node does not reach, if that are most of those that it has tried; else none."""
        now = time.monotonic()
        late = {each for each in self._following if now - self._heard[each] > 2 * self._interval}
        tried, unreached = {*self._following, *helpers}, {member} | late | silent
        return sorted(unreached) if len(tried) > 1 and 2 * len(unreached) > len(tried) else []

    def _report(self, member: str, reason: str) -> None:
        """Report a loss, and pass it on."""
        if member not in self._members or member in self._gone:
            return
        self._gone.add(member)
        logger.warning(coded("node %s (%s) is lost: %s", "FC-032"), member, self._members[member], reason)
        self._on_lost([member], reason)
        self._telling = asyncio.create_task(self._send_all({_KIND: _LOST, MEMBER: member, _REASON: reason}))
        self._follow_next()


async def _one_answers(probes: Sequence["asyncio.Task[State | None]"]) -> bool:
    """Return whether one of these probes finds that a member answers; the others are given up then."""
    try:
        for probe in asyncio.as_completed(probes):
            if await probe is State.ALIVE:
                return True
        return False
    finally:
        for probe in probes:
            probe.cancel()
