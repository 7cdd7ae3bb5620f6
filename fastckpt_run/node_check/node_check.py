"""Checks of this node for its job: before it joins, with the others of a round, and after a failure."""

import hashlib
import logging
import socket
import time
from collections.abc import Callable, Sequence

from fastckpt._core import metrics
from fastckpt._core.config import Settings
from fastckpt._core.error_codes import coded
from fastckpt._core.policy.node_check import CheckResult, Verdict, summary, worst
from fastckpt.errors import FastckptError
from fastckpt_run.members import Member
from fastckpt_run.node_check.board import Board, KeyValueStore
from fastckpt_run.node_check.local_checks import LocalChecks
from fastckpt_run.node_check.pair_check import CheckGone, PairCheck, PairOutcome

logger = logging.getLogger("fastckpt.launcher")

_DEADLINE, _BUDGET = 15.0, 30.0
"""Seconds that a check may take, and after which no further one of a node is begun."""
_THOROUGH, _QUICK = 0.5, 0.2
"""Seconds for which each rate is measured, before a node joins and while others wait for it."""
_WAIT = 10.0
"""Seconds that nodes of a round wait for each other: they have met already."""
_MOST_LOST = 2
"""Rounds in which the others may lose this node during their exchanges: once may be chance."""
_LINE = 500


class NodeCheckFailed(FastckptError):
    """This node has a problem, and takes no part in the job any more."""


class NodeCheck:
    """The node check of an agent, if the user wants one; else its methods do nothing.

    Args:
        settings: Settings of the job.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._is_on = settings.node_check
        self._results: list[CheckResult] | None = None
        self._seconds = 0.0
        self._has_failed = self._is_exchanging = False
        self._lost = 0

    def before_joining(self) -> None:
        """Check this node before its agent does anything else; once. Raises NodeCheckFailed."""
        if self._is_on and self._results is None:
            self._check_alone()

    def begin(self) -> None:
        """Record that check; raises as it."""
        self.before_joining()
        if self._results is not None:
            self._record("start", self._results, self._seconds)

    def failed(self, misplaced: str = "") -> None:
        """Have `after_failure` check: workers of this node have failed.

        Raises NodeCheckFailed if it is ``misplaced``, for that reason: a restart would go the same way.
        """
        self._has_failed = True
        if misplaced:
            raise NodeCheckFailed(misplaced)

    def after_failure(self) -> None:
        """Check this node again before its workers are restarted, if they have failed; raises NodeCheckFailed."""
        if not self._is_on or not self._has_failed:
            return
        self._has_failed = False
        try:
            self._check_alone(_QUICK)
        finally:
            self._record("failure", self._results or [], self._seconds)

    def with_others(
        self, store: KeyValueStore, members: Sequence[Member], rank: int, is_over: Callable[[], bool]
    ) -> list[Member] | None:
        """Check the nodes of a round with each other, if one of them has not been checked in a round.

        Args:
            store: That of the round.
            members: The agents of the round, by group rank.
            rank: Rank of this node among them.
            is_over: Returns whether the round has ended.

        Returns:
            The members that are bad, of which the round has to go on without; None if nothing was checked.

        Raises:
            NodeCheckFailed: This node is bad.
            RuntimeError: The round has ended meanwhile.
        """
        ranks = [each for each, member in enumerate(members) if member.checks >= 0]
        if rank not in ranks or len(ranks) < 2 or all(members[each].checks for each in ranks):
            return None
        ids = " ".join(members[each].id for each in ranks)
        board = Board(store, f"fastckpt/check/{hashlib.sha256(ids.encode()).hexdigest()}/", is_over)
        address = members[rank].address.rpartition(":")[0]
        begin, self._is_exchanging = time.monotonic(), True
        try:
            outcome = PairCheck(board, rank, ranks, address, self._results or [], _WAIT).run()
        except (CheckGone, OSError) as error:
            logger.warning("the nodes were not checked with each other: %s", error)
            outcome = None
        self._is_exchanging, self._lost = False, 0
        if outcome is None:
            return []
        decides = rank == ranks[0]
        self._record("round", [outcome.result], time.monotonic() - begin, outcome if decides else None)
        if outcome.is_bad:
            raise _failure([outcome.result])
        if outcome.slow:
            why = f"; this one: {outcome.result.message}" if rank in outcome.slow and outcome.result.message else ""
            logger.warning("slow nodes, which stay in the job: %s%s", _names(outcome, outcome.slow), why)
        if outcome.bad:
            text = coded("the job goes on without nodes that failed the node check: %s", "FC-038")
            logger.warning(text, _names(outcome, outcome.bad))
        return [members[each] for each in outcome.bad]

    def given_up(self) -> None:
        """Note that the others have taken this node for lost; raises NodeCheckFailed if that is due to the exchanges.

        A link that is too slow for data delays a node's signs of life as well. It would be lost and come again, and
        each time the others would stop their workers for it.
        """
        self._lost += self._is_exchanging
        self._is_exchanging = False
        if self._lost >= _MOST_LOST:
            message = f"the other nodes have lost it {self._lost} times while it exchanged data with them"
            result = CheckResult("pair", Verdict.PROBLEM, message)
            self._record("round", [result], 0.0)
            raise _failure([result])

    def _check_alone(self, seconds: float = _THOROUGH) -> None:
        begin = time.monotonic()
        checks = LocalChecks.of(self._settings, deadline=_DEADLINE, budget=_BUDGET, seconds=seconds)
        results = checks.run()
        self._results, self._seconds = results, time.monotonic() - begin
        verdict = worst(each.verdict for each in results)
        if verdict is Verdict.PROBLEM:
            raise _failure(results)
        text = "node check, %.1f s: %s"
        logger.warning(text, self._seconds, summary(results, _LINE))

    def _record(
        self, occasion: str, results: Sequence[CheckResult], seconds: float, outcome: PairOutcome | None = None
    ) -> None:
        bad, slow = (outcome.bad, outcome.slow) if outcome else ([], [])
        metrics.event(
            "node_check",
            occasion=occasion,
            host=socket.gethostname(),
            verdict=str(worst(each.verdict for each in results)),
            seconds=seconds,
            checks=[each.to_record() for each in results],
            bad=[{"host": outcome.hosts[rank], "node": rank} for rank in bad] if outcome else [],
            slow=[{"host": outcome.hosts[rank], "node": rank} for rank in slow] if outcome else [],
        )


def _failure(results: Sequence[CheckResult]) -> NodeCheckFailed:
    return NodeCheckFailed(
        coded(
            f"{socket.gethostname()} failed the node check, and takes no part in the job: {summary(results, _LINE)}. "
            "Look at it with `fastckpt check`, and start the job on another node (--fast-node-check)",
            "FC-038",
        )
    )


def _names(outcome: PairOutcome, ranks: Sequence[int]) -> str:
    return ", ".join(f"{outcome.hosts[rank]} (node {rank})" for rank in ranks)
