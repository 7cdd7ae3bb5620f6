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
floats = st.floats(allow_nan=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
ids = st.lists(numbers, max_size=2)
lists_of_ids = st.lists(st.lists(numbers, min_size=2, max_size=2), max_size=3)
many_texts = st.lists(texts, max_size=3)


def by_name(inner: st.SearchStrategy) -> st.SearchStrategy:
    return st.dictionaries(texts, inner, max_size=3)


OF_NAME = {
    **dict.fromkeys(("newest", "save", "durable"), ids),
    **dict.fromkeys(("persisted", "memory", "abandoned"), lists_of_ids),
    **dict.fromkeys(("slots", "verified", "bad", "lost"), many_texts),
    **dict.fromkeys(("files", "sizes", "lends"), by_name(numbers)),
    **dict.fromkeys(("policy", "remote_policy", "details"), by_name(numbers | texts)),
    "closed": st.lists(numbers, max_size=3),
    "sources": by_name(many_texts),
    "digests": by_name(texts),
    "values": by_name(floats),
}
OF_KIND = {
    m.Decided: dict.fromkeys(("memory", "storage"), st.none() | numbers)
    | dict.fromkeys(("overhead", "bound"), st.none() | floats),
    m.Fetched: {"files": by_name(texts)},
}
OF_TYPE = {int: numbers, str: texts, bool: st.booleans(), float: floats}


def messages(kind: type) -> st.SearchStrategy:
    hints, named = channel._HINTS[kind], OF_NAME | OF_KIND.get(kind, {})
    drawn = {f.name: named[f.name] if f.name in named else OF_TYPE[hints[f.name]] for f in fields(kind)}
    return st.builds(kind, **drawn)


any_message = st.one_of([messages(kind) for kind in KINDS])


@settings(max_examples=60)
@given(any_message)
def test_each_message_arrives_as_it_was_sent(message):
    assert channel.decode(channel.encode(message)) == message


def understood(data: bytes) -> bool:
    try:
        assert type(channel.decode(data)) in KINDS
    except ProtocolError as error:
        assert isinstance(error, FastckptError)
        return False
    return True


@settings(max_examples=80)
@given(st.data())
def test_a_message_with_one_changed_field_is_refused_or_understood(data: st.DataObject):
    message = data.draw(any_message)
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


def test_a_message_that_is_too_long_is_not_sent():
    with pytest.raises(ProtocolError, match=r"bytes is longer than 1048576"):
        channel.encode(m.Reserve({"x" * channel.MAX_SIZE: 1}))
