"""What a script logs reaches the saver over a real socket: the newest, seldom, and never by waiting."""

import socket
import threading

import pytest

from fastckpt._core import metrics
from fastckpt._core.client import logged_sender, worker_reports
from fastckpt._core.ipc import messages as m
from fastckpt._core.ipc.channel import Channel, bind, decode
from fastckpt._core.logged_values import LoggedValues

DEADLINE = 30.0


class Connection(Channel):
    """A worker's connection, as `SaverClient` reports through it."""

    def report_logged(self, step: int, values: dict[str, float]) -> None:
        self.send(m.Logged(step, values))


def received(peer: socket.socket) -> m.Message:
    size = int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "little")
    return decode(peer.recv(size, socket.MSG_WAITALL))


def test_a_saver_that_does_not_read_gets_the_newest_values_later(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics, "_logged", LoggedValues())
    monkeypatch.setattr(worker_reports, "_reports", worker_reports._Reports())
    monkeypatch.setattr(logged_sender, "_sender", None)
    monkeypatch.setattr(logged_sender, "PAUSE", 3600.0)  # only `send` sends after the first message
    with bind(address := f"@fastckpt-test-logged-{threading.get_native_id()}") as saver:
        saver.settimeout(DEADLINE)
        connection = Connection(address, DEADLINE)
        peer, _ = saver.accept()
    peer.settimeout(DEADLINE)
    with peer:
        worker_reports.opened(connection)
        logged_sender.begin()
        connection.report_logged(0, {"unread": 0.0})
        assert not connection.is_read
        for step in range(1, 2000):
            metrics.log(step, {"a": step})
            logged_sender._sender.send()
        assert received(peer) == m.Logged(0, {"unread": 0.0})
        assert connection.is_read
        worker_reports.closing(connection)  # what is left is sent before the end
        assert received(peer) == m.Logged(1999, {"a": 1999.0})
        connection.close()
        assert not connection.is_read
