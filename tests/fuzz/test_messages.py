"""Arbitrary bytes at both ends of a connection: a message, or a fastckpt error; neither end waits for ever."""

import asyncio
import json
import secrets
import socket
import struct
import threading
from contextlib import suppress
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._core.ipc import channel
from fastckpt._core.ipc import messages as m
from fastckpt._core.policy.retention import from_json
from fastckpt.errors import AgentLost, ProtocolError
from tests.fuzz.mutations import DEPTHS, PIECES, mutated, mutations
from tests.support.tables import for_each

KINDS = get_args(m.Message)
GOOD = [
    m.Hello("/checkpoints", 0, 2, 2, 0, 1, {"keep": "any", "of": [{"keep": "last", "n": 3}]}),
    m.BeginSave(1, 7, {"model.pt": 1 << 40, "rank_0.pt": 5000}),
    m.Committed(1, 7, True, "/somewhere/model.pt"),
    m.Uncommitted(1, 7, "slot-0 cannot be written to"),
    m.Granted("/dev/shm/slot-1", [[1, 5], [1, 6]], "no space"),
    m.Status(2, [1, 7], [], ""),
    m.Resumed("memory", ["step 3"]),
    m.Loaded([1, 7], "storage", 0.25),
    m.Decided(7, 5, 10, 0.031, 0.035, True, "the bound is broken"),
    m.Ask(),
]


def decoded(data: bytes) -> m.Message | None:
    """The message, if it is one; any other error than ours fails a test."""
    try:
        return channel.decode(data)
    except ProtocolError:
        return None


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(GOOD), mutations(PIECES))
def test_damaged_messages_are_understood_or_protocol_errors(message, changes):
    found = decoded(mutated(channel.encode(message), changes))
    assert found is None or (type(found) in KINDS and channel.decode(channel.encode(found)) == found)
    if isinstance(found, m.Hello):
        with suppress(ProtocolError):
            from_json(found.policy)


@for_each(("[", "]"), ('{"a":', "}"))
def test_deeply_nested_messages_are_understood_or_protocol_errors(opening, closing):
    """From depths that are read to such as are not: what is a recursion error anywhere is a ProtocolError."""
    hello = {"directory": "", "local_rank": 0, "local_world_size": 1, "world_size": 1, "group_rank": 0}
    text = json.dumps({"message": "Hello", "content": hello | {"restart_count": 0, "policy": "HERE"}})
    for depth in DEPTHS:
        deep = opening * depth + "1" + closing * depth
        decoded(f'{{"message": "Committed", "content": {{"history": {deep}, "step": 1, "persist": true}}}}'.encode())
        decoded(f'{{"message": {deep}, "content": {{}}}}'.encode())
        assert decoded(text.replace('"HERE"', deep).encode()) is None or opening != "[", "a list is no policy"


frames = st.lists(st.sampled_from(GOOD).map(channel.pack) | st.binary(max_size=30), max_size=5).map(b"".join)


async def received(data: bytes) -> list[m.Message]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    found = []
    while (message := await channel.receive(reader)) is not None:
        found.append(message)
    return found


@settings(max_examples=100, deadline=None)
@given(
    frames,
    mutations([struct.pack("<I", n) for n in (0, 1, channel.MAX_SIZE, channel.MAX_SIZE + 1, 2**32 - 1)]),
    st.booleans(),
)
def test_the_saver_survives_a_stream_of_any_bytes(data, changes, damaged):
    try:
        found = asyncio.run(received(mutated(data, changes) if damaged else data))
    except ProtocolError:
        return
    assert all(type(message) in KINDS for message in found)


def test_a_client_survives_any_answers_of_the_saver():
    """Somebody else is at its address, answers each question with some bytes, and hangs up."""
    address, says = f"@fastckpt-test-{secrets.token_hex(8)}", [b""]
    listener = channel.bind(address)

    def lie() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(says[0])

    liar = threading.Thread(target=lie, daemon=True)
    liar.start()

    @settings(max_examples=100, deadline=None)
    @given(st.sampled_from(GOOD).map(channel.pack), mutations([b"\0", b"\xff\xff", *PIECES]), st.booleans())
    def asks(good: bytes, changes: list, damaged: bool) -> None:
        says[0] = mutated(good, changes) if damaged else good
        asker = channel.Channel(address, 60)
        try:
            assert type(asker.ask(m.Ask())) in KINDS
        except (AgentLost, ProtocolError):
            assert damaged
        finally:
            asker.close()

    try:
        asks()
        says[0] = struct.pack("<I", 2**32 - 1) + b"x" * 100
        asker = channel.Channel(address, 60)
        with pytest.raises(ProtocolError, match="4294967295 bytes is longer"):
            asker.ask(m.Ask())
        with pytest.raises(AgentLost):
            asker.ask(m.Ask())
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        liar.join(60)
        listener.close()
