"""Exchange of data over real connections, with partners that change it, fall silent, hang up or are slow."""

import secrets
import socket
import threading
import time
from contextlib import closing, suppress

import pytest

from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt.errors import FastckptError
from fastckpt_run.node_check import exchange
from fastckpt_run.node_check.exchange import ExchangeFailed, follow, lead

SECRET = secrets.token_bytes(32)


def with_partner(partner, call, timeout=5.0):
    """Result of a call whose other end runs ``partner`` in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run():
            connected, _ = server.accept()
            link = SealedConnection.accept(connected, SECRET, timeout)
            with closing(link), suppress(OSError, FastckptError):
                partner(link)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            address = f"127.0.0.1:{server.getsockname()[1]}"
            with closing(SealedConnection.connect(address, SECRET, timeout)) as link:
                return call(link)
        finally:
            thread.join(30)


def damaged(link):
    link.send_bytes(exchange._pattern()[:-1] + b"?")
    link.receive_bytes(exchange._BLOCK)


def falls_silent(link):
    link.receive_bytes(exchange._BLOCK)
    time.sleep(1.5)


def trickles(link):
    for byte in exchange._pattern()[:40]:
        link.send_bytes(bytes([byte]))
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("partner", "error", "text"),
    [
        (damaged, ExchangeFailed, "changed"),
        # It hangs up: by whether it had read all.
        (lambda link: link.send_bytes(b"x" * 100), (FastckptError, OSError), "hung up|reset|Broken pipe"),
        (falls_silent, OSError, "timed out"),
        (trickles, ExchangeFailed, "too slow"),
        (None, FastckptError, "no"),
    ],
    ids=["damaged", "hangs_up", "falls_silent", "trickles", "speaks_otherwise"],
)
def test_a_partner_that_does_not_exchange_as_it_should_fails_the_exchange(partner, error, text):
    def answers(link):
        link.receive()
        link.send({} if partner else {"refused": "no"})
        if partner:
            partner(link)

    with pytest.raises(error, match=text):
        with_partner(answers, lambda link: lead(link, time.monotonic() + 1.0), timeout=1.0)


@pytest.mark.parametrize("order", [{"blocks": 1 << 20}, {"blocks": True}])
def test_orders_that_make_no_sense_are_refused(order):
    refused = []

    def partner(link):
        try:
            follow(link, time.monotonic() + 20.0)
        except FastckptError as error:
            refused.append(str(error))

    with pytest.raises((FastckptError, OSError)):
        with_partner(partner, lambda link: link.ask(order), timeout=5.0)
    assert refused == ["the other node does not exchange data as this one does"]
