"""Messages: a sent one arrives, and any other bytes are a ProtocolError."""

import json
from dataclasses import fields
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._core.ipc import channel
from fastckpt._core.ipc import messages as m
from fastckpt.errors import FastckptError, ProtocolError

KINDS = get_args(m.Message)
numbers = st.integers(0, 2**63 - 1)
texts = st.text(max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
OF_NAME = {
    "files": st.dictionaries(texts, numbers, max_size=3),
    "policy": st.dictionaries(texts, numbers | texts, max_size=3),
    "persisted": st.lists(st.lists(numbers, min_size=2, max_size=2), max_size=3),
    "remote_policy": st.dictionaries(texts, numbers | texts, max_size=3),
    "newest": st.lists(numbers, max_size=2),
    "save": st.lists(numbers, max_size=2),
    "durable": st.lists(numbers, max_size=2),
    "slots": st.lists(texts, max_size=3),
    "verified": st.lists(texts, max_size=3),
    "persist": st.booleans(),
    "memory": st.lists(st.lists(numbers, min_size=2, max_size=2), max_size=3),
    "abandoned": st.lists(st.lists(numbers, min_size=2, max_size=2), max_size=3),
    "bad": st.lists(texts, max_size=3),
    "lost": st.lists(texts, max_size=3),
    "closed": st.lists(numbers, max_size=3),
    "sources": st.dictionaries(texts, st.lists(texts, max_size=3), max_size=3),
    "sizes": st.dictionaries(texts, numbers, max_size=3),
    "digests": st.dictionaries(texts, texts, max_size=3),
    "lends": st.dictionaries(texts, numbers, max_size=3),
    "values": st.dictionaries(texts, st.floats(allow_nan=False), max_size=3),
    "details": st.dictionaries(texts, numbers | texts, max_size=3),
}
OF_DECIDED = {name: st.none() | numbers for name in ("memory", "storage")} | {
    name: st.none() | st.floats(allow_nan=False) for name in ("overhead", "bound")
}
OF_FETCHED = {"files": st.dictionaries(texts, texts, max_size=3)}
OF_TYPE = {int: numbers, str: texts, bool: st.booleans(), float: st.floats(allow_nan=False)}


def messages(kind: type) -> st.SearchStrategy:
    hints, named = channel._HINTS[kind], OF_NAME | {m.Decided: OF_DECIDED, m.Fetched: OF_FETCHED}.get(kind, {})
    return st.builds(
        kind, **{f.name: named[f.name] if f.name in named else OF_TYPE[hints[f.name]] for f in fields(kind)}
    )


@settings(deadline=None)
@given(st.one_of([messages(kind) for kind in KINDS]))
def test_each_message_arrives_as_it_was_sent(message):
    assert channel.decode(channel.encode(message)) == message


def understood(data: bytes) -> bool:
    try:
        assert type(channel.decode(data)) in KINDS
    except ProtocolError:
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_as_a_message(data: bytes):
    assert not understood(data)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(texts, values, max_size=4), st.sampled_from([k.__name__ for k in KINDS]) | values)
def test_arbitrary_json_is_refused_or_understood_as_a_message(content: dict, kind: object):
    understood(json.dumps({"message": kind, "content": content}).encode())


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_message_with_one_changed_field_is_refused_or_understood(data: st.DataObject):
    message = data.draw(st.one_of([messages(kind) for kind in KINDS]))
    whole = json.loads(channel.encode(message))
    content = data.draw(st.sampled_from([whole, whole["content"]]))
    name = data.draw(st.sampled_from([*content, "surplus"]))
    if data.draw(st.booleans()):
        content[name] = data.draw(values)
    else:
        content.pop(name, None)
    text = json.dumps(whole).encode()
    if understood(text):
        assert channel.decode(channel.encode(channel.decode(text))) == channel.decode(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "[]", "1", '"Ask"', "{}", "[" * 100_000,
        '{"message": "Ask"}', '{"content": {}}', '{"message": "Ask", "content": []}',
        *(f'{{"message": {kind}, "content": {{}}}}' for kind in ('"Nothing"', "null", "[]", "{}", "1", '["Ask"]')),
        *(f'{{"message": "Committed", "content": {{"history": 1, "step": {rest}}}}}' for rest in (
            "1", '-1, "persist": true', '1.0, "persist": true', 'true, "persist": true', '1, "persist": 1',
            '"1", "persist": true', '1, "persist": true, "more": 0', "9" * 5000 + ', "persist": true',
        )),
        *(f'{{"message": "Reserve", "content": {{"files": {f}}}}}' for f in ('{"a": "b"}', "[]", '{"a": -1}', "1")),
        '{"message": "Pinned", "content": {"slots": "abc"}}',
    ],
    ids=lambda text: text[:60] or "nothing",
)  # fmt: skip
def test_invalid_messages_are_refused(text: str):
    assert not understood(text.encode())


def test_examples_of_invalid_messages_differ_from_valid_ones_by_their_fault_alone():
    assert understood(b'{"message": "Committed", "content": {"history": 1, "step": 1, "persist": true}}')
    assert understood(b'{"message": "Reserve", "content": {"files": {"a": 1}}}')


def test_a_message_that_is_too_long_is_not_sent():
    with pytest.raises(ProtocolError, match=r"bytes is longer than 1048576"):
        channel.encode(m.Reserve({"x" * channel.MAX_SIZE: 1}))


def test_protocol_errors_are_fastckpt_errors():
    assert issubclass(ProtocolError, FastckptError)
