"""Exchanges of nodes on which a user runs `fastckpt check`: they meet in a store that the first one holds."""

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fastckpt._core.policy.node_check import CheckResult, Verdict
from fastckpt.errors import ConfigError
from fastckpt_run.members import host_for
from fastckpt_run.node_check.board import Board, ConnectedStore
from fastckpt_run.node_check.pair_check import CheckGone, PairCheck
from fastckpt_run.rendezvous.store_connection import StoreConnection, StoreLost, threads_end

_LOOK = 0.2
_PROBE = 2.0


def check_by_hand(
    endpoint: str, rank: int, count: int, results: Sequence[CheckResult], wait: float
) -> tuple[CheckResult, list[int]]:
    """Check a node with others.

    Args:
        endpoint: HOST:PORT of the first node.
        rank: Rank of this node.
        count: Number of nodes.
        results: Results of this node's own checks.
        wait: Seconds to wait for others.

    Returns:
        The result, and the ranks of those that did not come.

    Raises:
        ConfigError: The first node cannot listen there, or another node has the same rank.
    """
    host, _, text = endpoint.rpartition(":")
    host, port, begin = host.strip("[]"), int(text), time.monotonic()
    server = _hold(host, port) if rank == 0 else None
    try:
        connection = _connected("127.0.0.1" if server else host, port, begin + wait)
        try:
            return _check(connection, host, rank, count, results, wait)
        finally:
            connection.close()
            threads_end(1.0)
    except (StoreLost, CheckGone, OSError) as error:
        return CheckResult("pair", Verdict.UNKNOWN, str(error), seconds=time.monotonic() - begin), []
    finally:
        del server


def _check(
    connection: StoreConnection, host: str, rank: int, count: int, results: Sequence[CheckResult], wait: float
) -> tuple[CheckResult, list[int]]:
    if connection.add(f"taken/{rank}", 1) != 1:
        raise ConfigError(f"another node has come with --node-rank {rank}; give each its own, from 0 on")
    board = Board(ConnectedStore(connection), "check/")
    outcome = PairCheck(board, rank, range(count), host_for(host, rank, None), results, wait).run()
    if len(outcome.absent) == count - 1:
        return replace(outcome.result, verdict=Verdict.UNKNOWN, message="no other node has come"), outcome.absent
    return outcome.result, outcome.absent


def _hold(host: str, port: int) -> TCPStore:
    try:
        return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    except RuntimeError as error:
        raise ConfigError(
            f"node 0 cannot listen at port {port} ({str(error).splitlines()[0][:200]}); name a port that is free there "
            "(--rdzv-endpoint)"
        ) from error


def _connected(host: str, port: int, end: float) -> StoreConnection:
    """A connection to the store of the first node, which may come later; raises StoreLost."""
    while True:
        # torch's client prints a stack for each attempt that fails: the server has to listen first.
        with suppress(OSError), socket.create_connection((host, port), timeout=_PROBE):
            return StoreConnection(host, port)
        if time.monotonic() > end:
            raise StoreLost(f"node 0 is not reached at {host}:{port}", ended=True)
        time.sleep(_LOOK)
