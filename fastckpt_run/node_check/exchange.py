"""Exchange of data between two nodes, both ways at once: it has to arrive unchanged, and its rate is measured."""

import hashlib
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache

from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.policy.node_check import CheckResult, Verdict
from fastckpt.errors import FastckptError, ProtocolError

_BLOCK = 1 << 16
LARGEST = 1024
"""Blocks of 64 KiB that are exchanged at most."""
_STEPS, _STEP = (1, 4, 16), 2.0
"""Blocks of the exchanges before the one that is measured, and seconds that each may take. A slow link is filled for a
moment only: a node's signs of life take the same way."""
_SECONDS = 0.3
"""Duration of the measured exchange."""


class ExchangeFailed(FastckptError):
    """Data did not arrive, or not as it was sent."""


@cache
def _pattern() -> bytes:
    """Return the bytes to send: the same on all nodes, and not compressible by a network."""
    return hashlib.shake_256(b"fastckpt node check").digest(_BLOCK)


def lead(link: SealedConnection, end: float) -> float:
    """Exchange data with whoever follows, little at first, then as much as takes a moment; the rate in MB/s.

    Raises:
        ExchangeFailed: It arrived changed, or not before ``end`` on the monotonic clock.
        OSError: A wait of the connection took too long, or it broke.
        ProtocolError: The other end hung up.
    """
    rate = 0.0
    for blocks in _STEPS:
        rate = _exchange(link, blocks, min(end, time.monotonic() + _STEP))
    blocks = max(1, min(LARGEST, round(rate * 1e6 * _SECONDS / _BLOCK)))
    rate = _exchange(link, blocks, end)
    link.ask({"blocks": 0})
    return rate


def follow(link: SealedConnection, end: float) -> float:
    """Exchange data with whoever leads; returns and raises as `lead`."""
    rate = 0.0
    while True:
        order = link.receive()
        blocks = order.get("blocks") if order else None
        if type(blocks) is not int or not 0 <= blocks <= LARGEST:
            raise ProtocolError("the other node does not exchange data as this one does")
        link.send({})
        if blocks == 0:
            return rate
        rate = _both_ways(link, blocks, end)


def _exchange(link: SealedConnection, blocks: int, end: float) -> float:
    link.ask({"blocks": blocks})
    return _both_ways(link, blocks, end)


def _both_ways(link: SealedConnection, blocks: int, end: float) -> float:
    pattern, begin = _pattern(), time.perf_counter()

    def send() -> None:
        for _ in range(blocks):
            link.send_bytes(pattern)
            if time.monotonic() > end:
                return

    with ThreadPoolExecutor(1, "fastckpt-exchange") as sender:
        sent = sender.submit(send)
        try:
            for _ in range(blocks):
                _receive(link, pattern, end)
        except BaseException:
            link.close()  # so that the sender does not wait for a reader
            raise
        sent.result()
    return blocks * _BLOCK / (time.perf_counter() - begin) / 1e6


def _receive(link: SealedConnection, pattern: bytes, end: float) -> None:
    block = bytearray(_BLOCK)
    with memoryview(block) as view:
        done = 0
        while done < _BLOCK:
            with view[done:] as rest:
                done += link.receive_into(rest)
            if time.monotonic() > end:
                raise ExchangeFailed("too slow")
    if block != pattern:
        raise ExchangeFailed("data arrived changed")


def check_loopback(name: str, seconds: float) -> CheckResult:
    """Exchange data with this process over 127.0.0.1; the value is the rate in MB/s."""
    secret, end = secrets.token_bytes(32), time.monotonic() + seconds
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(seconds)

        def answer() -> None:
            connected, _ = server.accept()
            with closing(SealedConnection.accept(connected, secret, seconds)) as link:
                follow(link, end)

        other = threading.Thread(target=answer, name="fastckpt-loopback", daemon=True)
        other.start()
        with closing(SealedConnection.connect(f"127.0.0.1:{server.getsockname()[1]}", secret, seconds)) as link:
            rate = lead(link, end)
        other.join(seconds)
    return CheckResult(name, Verdict.OK, "", rate, "MB/s")
