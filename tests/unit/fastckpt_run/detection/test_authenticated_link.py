"""Connections between agents that end otherwise than they should."""

import asyncio
import gc
import socket
import struct

import pytest

from fastckpt_run.detection.authenticated_link import AuthenticatedLink, Purpose

PURPOSE = Purpose("watch", "a", "b")


def test_a_reset_connection_is_an_error_for_its_caller_and_none_that_asyncio_logs(monkeypatch):
    # The future with the error may be collected before its protocol: here it always is one that nobody has looked at.
    monkeypatch.delattr(asyncio.StreamReaderProtocol, "__del__")
    logged = []

    async def reset_in_the_handshake() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: logged.append(context))
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            opening = asyncio.create_task(
                AuthenticatedLink.open(f"127.0.0.1:{server.getsockname()[1]}", b"secret", PURPOSE)
            )
            accepted, _ = await loop.sock_accept(server)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.close()
            with pytest.raises(ConnectionResetError):
                await opening
        await asyncio.sleep(0.1)

    asyncio.run(reset_in_the_handshake())
    gc.collect()
    assert logged == []
