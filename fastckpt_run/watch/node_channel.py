"""Questions among the agents of a round about their nodes: to one, to the first, to all."""

import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.saver.peers.peer_round import PeerRound
from fastckpt._core.saver.server import Saver
from fastckpt.errors import FastckptError, ProtocolError

ASK = "watch"
"""The request, among those that agents serve each other."""
AT_ONCE = 32
"""Agents that are asked at the same time, at most."""

Body = dict[str, Any]
Answer = Callable[[int, Body], Body]
"""Answers a question of a node, given by its rank; called in any thread.

It must not wait for other nodes' answers, unless those wait for nobody, and the question came by `NodeChannel.ask`.
"""


class NodeChannel:
    """Asks the agents of other nodes, and answers them; a node alone asks itself.

    Messages are JSON objects of at most 4 MiB, sealed with the job's secret. All methods may be called in any thread.

    Args:
        saver: Serves the other agents.
    """

    def __init__(self, saver: Saver) -> None:
        self._answers: dict[str, Answer] = {}
        self._round: PeerRound | None = None
        self._ranks: Mapping[str, int] = {}
        self._first: tuple[PeerRound, SealedConnection] | None = None
        self._lock = threading.Lock()
        saver.serve(ASK, self._receive)

    @property
    def node(self) -> int:
        """The rank of this node in its round; 0 before the first one."""
        return self._round.own if self._round else 0

    @property
    def nodes(self) -> int:
        """Number of nodes in the round; 1 before the first one."""
        return len(self._round.peers) if self._round else 1

    @property
    def round(self) -> PeerRound | None:
        """The round itself: another one after each restart; None before the first one."""
        return self._round

    @property
    def hosts(self) -> list[str]:
        """The names of all nodes' hosts, for people to read, by rank; one empty name before the first round."""
        return [peer.host or peer.address for peer in self._round.peers] if self._round else [""]

    def answer(self, subject: str, answer: Answer) -> None:
        """Have questions about ``subject`` answered; call it before the first round."""
        self._answers[subject] = answer

    def meet(self, round: PeerRound) -> None:
        """Talk to the agents of a new round."""
        self._ranks = {peer.id: rank for rank, peer in enumerate(round.peers)}
        self._round = round

    def ask_first(self, subject: str, body: Body, timeout: float) -> Body:
        """Ask the agent of the first node, over a connection that is kept; raises as `ask`."""
        if (round := self._round) is None or round.own == 0:
            return self._answers[subject](0, body)
        with self._lock:
            if self._first is None or self._first[0] is not round:
                self._hang_up()
                link = SealedConnection.connect(round.peers[0].address, round.secret, timeout)
                self._first = round, link
            try:
                return _asked(self._first[1], round, subject, body)
            except (FastckptError, OSError):
                self._hang_up()
                raise

    def ask(self, node: int, subject: str, body: Body, timeout: float, *, reach: float | None = None) -> Body:
        """Ask the agent of a node.

        Args:
            node: Its rank in the round.
            subject: Name of the answer that is asked for.
            body: The question.
            timeout: Seconds that each wait of the connection may take.
            reach: Seconds for each wait until it is reached, if these are fewer: a lost node or a stopped agent is not
                waited for as long as an answer may take.

        Raises:
            OSError: It is not reached, or does not answer in time.
            FastckptError: It refuses, or is not in this round.
        """
        round = self._round
        if round is None or node == round.own:
            return self._answers[subject](self.node, body)
        first = timeout if reach is None else reach
        link = SealedConnection.connect(round.peers[node].address, round.secret, first, later=timeout)
        try:
            return _asked(link, round, subject, body)
        finally:
            link.close()

    def ask_all(
        self,
        subject: str,
        body: Body,
        timeout: float,
        *,
        nodes: Sequence[int] | None = None,
        at_once: int = AT_ONCE,
        reach: float | None = None,
    ) -> Mapping[int, Body]:
        """Ask the agents of all nodes, this one included; the answers of those that gave one in time, by rank.

        It takes at most ``timeout`` seconds for each ``at_once`` nodes. If ``nodes`` are given, only these are asked;
        ``reach`` is as in `ask`.
        """
        found: dict[int, Body] = {}
        nodes = range(self.nodes) if nodes is None else nodes
        if not nodes:
            return found
        pool = ThreadPoolExecutor(min(at_once, len(nodes)), "fastckpt-ask")
        asked = {pool.submit(self.ask, node, subject, body, timeout, reach=reach): node for node in nodes}
        done, _ = wait(asked, timeout * math.ceil(len(nodes) / at_once))
        # A question has several waits, each of which may last: late answers are not waited for.
        pool.shutdown(wait=False, cancel_futures=True)
        for one in done:
            with contextlib.suppress(OSError, FastckptError, LookupError):  # a node that is lost answers nothing
                found[asked[one]] = one.result()
        return dict(sorted(found.items()))

    def close(self) -> None:
        """Ask nobody any more."""
        with self._lock:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._first is not None:
            with contextlib.suppress(OSError):
                self._first[1].close()
        self._first = None

    def _receive(self, _: SealedConnection, request: Body) -> Body:
        sender = self._ranks.get(str(request.get("from")))
        if sender is None:
            raise ProtocolError("the agent is not in this round, or not yet")
        answer, body = self._answers.get(str(request.get("subject"))), request.get("body")
        if answer is None or not isinstance(body, dict):
            raise ProtocolError(f"nobody here answers questions about {request.get('subject')!r}")
        return {"body": answer(sender, body)}


def _asked(link: SealedConnection, round: PeerRound, subject: str, body: Body) -> Body:
    answer = link.ask({"ask": ASK, "from": round.peers[round.own].id, "subject": subject, "body": body}).get("body")
    if not isinstance(answer, dict):
        raise ProtocolError(f"the answer about {subject!r} is no object")
    return answer
