"""Sends the large files that only this node has to its partners, which keep them in their memory."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fastckpt._core import metrics
from fastckpt._core.byte_sizes import binary, decimal
from fastckpt._core.error_codes import coded
from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.direct import digest_file
from fastckpt._core.io.rate import RateLimit
from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.memory.held_saves import HeldSave
from fastckpt._core.policy.replicas.copy_sizes import SMALL
from fastckpt._core.saver.peers.common_saves import CommonSave
from fastckpt._core.saver.peers.file_transfer import TIMEOUT, SaveName
from fastckpt._core.saver.peers.parity_transfer import send_chunk
from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
from fastckpt._core.saver.peers.replica_transfer import LargeFile, send_replica
from fastckpt._core.saver.stats import ReplicaCounts
from fastckpt.errors import ArenaTooSmall, FastckptError

logger = logging.getLogger("fastckpt")
notices = logging.getLogger("fastckpt.report")
"""Logger for lines that are shown though nothing is wrong."""

STREAMS = 4
"""Files that are sent at once: one connection keeps a core of the receiver busy."""
CONNECTING = 5.0
"""Seconds to reach a partner: the end of the agent may wait for them."""
GIVE_UP = 10.0
"""Seconds of failures after which a save counts as common without its copies."""


class ReplicaSender:
    """The copies of one checkpoint directory. One thread sends; others may `assume` and `close` meanwhile.

    Args:
        directory: The checkpoint directory.
        rate: A limit on the bytes that this node sends per second.
        counts: Counters of copies.
    """

    def __init__(self, directory: str, rate: RateLimit | None, counts: ReplicaCounts) -> None:
        self._directory, self._rate, self._counts = directory, rate, counts
        self._round: PeerRound | None = None
        self._idle: dict[str, list[SealedConnection]] = {}
        self._busy: set[SealedConnection] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._failing: float | None = None
        self._digests: tuple[tuple[SaveId, str], dict[str, str]] | None = None
        self._warned, self._shown = list[str](), ""
        self._skipped: tuple[SaveId, str] | None = None

    def assume(self, round: PeerRound) -> None:
        """Take part in a new round: transfers to agents of the last one end."""
        with self._lock:
            self._round, self._failing = round, None
            self._hang_up()

    def close(self) -> None:
        """Send nothing more."""
        with self._lock:
            self._closed = True
            self._hang_up()

    def send(self, held: HeldSave, common: CommonSave, round: PeerRound) -> bool | None:
        """Have all partners keep the large files of a save that this node alone has.

        Returns whether they do; None if that has failed, and is to be tried again.

        Args:
            held: The save.
            common: The newest save that all nodes hold, of which nothing may be released yet.
            round: The round.
        """
        large = {name: size for name, size in held.own_files.items() if size > SMALL}
        # Files of nodes that are gone have no second copy yet: only a save of this round's nodes is all here.
        # And agents on one host lose their memory together.
        memories = {peer.memory for peer in round.peers}
        is_of_round = bool(held.details.get("nodes", 1) == len(round.peers)) and len(memories) > 1
        if not large and not (round.parity and round.partners):  # the others' parity waits for an empty chunk, too
            return is_of_round
        # Existing parity of a save of other nodes covers files of lost nodes: new parity would replace it.
        if not round.partners or (round.parity and not is_of_round):
            return False
        since = time.perf_counter()
        try:
            with metrics.phase("replicas.send", step=held.id.step):
                sent = self._send(held, large, common, round)
        except ArenaTooSmall as error:
            self._skip(held, large, str(error), round)
            return False
        except (FastckptError, OSError) as error:
            self._failing = self._failing or time.monotonic()
            if self._closed or time.monotonic() - self._failing < GIVE_UP:
                logger.debug("copies of %s are sent again: %s", held.id, error)
                return None
            self._skip(held, large, str(error), round)
            return False
        self._failing, self._warned = None, []
        if sent:
            self._counts.saves += 1
            self._counts.size += sent
            seconds = time.perf_counter() - since
            metrics.event(
                "replicated", history=held.id.history, step=held.id.step, bytes=sent, seconds=seconds, to=_hosts(round)
            )
            self._show(held.id, sent, seconds, round)
        return is_of_round

    def _show(self, id: SaveId, size: int, seconds: float, round: PeerRound) -> None:
        """Show once which way copies take, and how fast: of several networks the slow one is seldom meant."""
        to = ", ".join(f"{peer.host} ({peer.address})" for peer in round.partners)
        if to != self._shown:
            self._shown = to
            text = "copies of what this host alone has go from %s to %s: %s of step %d took %.2f s, %s/s%s"
            limit = ", within --fast-replica-mbps" if self._rate else ""
            own = round.peers[round.own].address
            notices.info(text, own, to, decimal(size), id.step, seconds, decimal(int(size / seconds)), limit)

    def _send(self, held: HeldSave, large: dict[str, int], common: CommonSave, round: PeerRound) -> int:
        """Send the files that partners lack; returns the bytes that were sent."""
        save = SaveName(self._directory, held.id, held.attempt)
        digests = self._digests_of(held, large)

        files = [LargeFile(name, held.files[name], large[name], digests[name]) for name in sorted(large)]

        troubles: dict[Peer, Exception] = {}

        def copy(peer: Peer, file: LargeFile) -> int:
            if (trouble := troubles.get(peer)) is not None:
                raise trouble  # each file else would wait for a partner that is silent
            try:
                with _named(peer), self._link(peer, round) as link:
                    return file.size if send_replica(link, save, file, common.id, self._rate) else 0
            except (FastckptError, OSError) as error:
                troubles[peer] = error
                raise

        def add(peer: Peer) -> int:
            pair = round.peers[round.own].id, peer.id
            with _named(peer), self._link(peer, round) as link:
                return send_chunk(link, save, files, round.group, pair, common, self._rate)

        work: list[Callable[[], int]] = [partial(copy, peer, file) for file in files for peer in round.partners]
        if round.parity:
            work = [partial(add, peer) for peer in round.partners]
        with ThreadPoolExecutor(min(STREAMS, len(work)), "fastckpt-replicas") as pool:
            return sum(future.result() for future in [pool.submit(each) for each in work])

    def _digests_of(self, held: HeldSave, large: Collection[str]) -> dict[str, str]:
        """The digests of large files, computed once for each save."""
        if self._digests is None or self._digests[0] != (held.id, held.attempt):
            with metrics.phase("replicas.digest", step=held.id.step):
                found = {name: held.digests.get(name) or digest_file(held.files[name]) for name in large}
            self._digests = (held.id, held.attempt), found
        return self._digests[1]

    def _skip(self, held: HeldSave, large: dict[str, int], why: str, round: PeerRound) -> None:
        """Count a save without copies, once, and warn once of each kind of trouble."""
        if self._skipped == (held.id, held.attempt):
            return  # the other nodes have not done with it, so it was tried again
        self._skipped = held.id, held.attempt
        self._counts.skipped += 1
        metrics.event(
            "replica_skipped", history=held.id.history, step=held.id.step, bytes=sum(large.values()), reason=why
        )
        kind = why.split(":")[:2]  # the host, and the kind of trouble; numbers follow
        if self._warned != kind:
            self._warned = kind
            text = coded(
                "step %d is not copied to %s (%s in %s): %s. A loss of this host costs what is not on storage",
                "FC-045",
            )
            files = "1 file" if len(large) == 1 else f"{len(large)} files"
            logger.warning(text, held.id.step, _hosts(round), binary(sum(large.values())), files, why.rstrip("."))

    @contextlib.contextmanager
    def _link(self, peer: Peer, round: PeerRound) -> Iterator[SealedConnection]:
        """A connection that no other thread uses; it is kept for later if all goes well."""
        with self._lock:
            if self._closed or round is not self._round:
                raise FastckptError("the round has ended")
            idle = self._idle.setdefault(peer.address, [])
            link = idle.pop() if idle else None
        link = link or SealedConnection.connect(peer.address, round.secret, CONNECTING, later=TIMEOUT)
        with self._lock:
            if self._closed or round is not self._round:
                link.close()
                raise FastckptError("the round has ended")
            self._busy.add(link)
        try:
            yield link
        except BaseException:
            link.close()
            raise
        else:
            with self._lock:
                if round is self._round and not self._closed:
                    self._idle[peer.address].append(link)
                else:
                    link.close()
        finally:
            with self._lock:
                self._busy.discard(link)

    def _hang_up(self) -> None:
        for link in [*self._busy, *(link for links in self._idle.values() for link in links)]:
            link.abort()
        for link in [link for links in self._idle.values() for link in links]:
            link.close()
        self._idle.clear()


@contextlib.contextmanager
def _named(peer: Peer) -> Iterator[None]:
    """Name the host that has no room: its message on a directory means its own."""
    try:
        yield
    except ArenaTooSmall as error:
        raise ArenaTooSmall(f"{peer.host or peer.address}: {error}") from error


def _hosts(round: PeerRound) -> str:
    return ", ".join(peer.host or peer.address for peer in round.partners)
