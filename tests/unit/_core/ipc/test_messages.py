"""Messages that are none: each is a ProtocolError; what bytes of good ones may become is tried by tests/fuzz."""

import pytest

from fastckpt._core.ipc import channel
from fastckpt._core.ipc import messages as m
from fastckpt.errors import ProtocolError
from tests.support.tables import for_each


@for_each(
    "", "null", "[]", "1", '"Ask"', "{}", "[" * 100_000,
        '{"message": "Ask"}', '{"content": {}}', '{"message": "Ask", "content": []}',
        *(f'{{"message": {kind}, "content": {{}}}}' for kind in ('"Nothing"', "null", "[]", "{}", "1", '["Ask"]')),
        *(f'{{"message": "Committed", "content": {{"history": 1, "step": {rest}}}}}' for rest in (
            "1", '-1, "persist": true', '1.0, "persist": true', 'true, "persist": true', '1, "persist": 1',
            '"1", "persist": true', '1, "persist": true, "more": 0', "9" * 5000 + ', "persist": true',
        )),
        *(f'{{"message": "Reserve", "content": {{"files": {f}}}}}' for f in ('{"a": "b"}', "[]", '{"a": -1}', "1")),
    '{"message": "Pinned", "content": {"slots": "abc"}}',
)  # fmt: skip
def test_invalid_messages_are_refused(text: str):
    with pytest.raises(ProtocolError):
        channel.decode(text.encode())


def test_valid_messages_arrive_and_one_that_is_too_long_is_not_sent():
    """The former differ from invalid ones by their fault alone."""
    good = [m.Committed(1, 1, True), m.Reserve({"a": 1}), m.Pinned(["abc"]), m.Ask()]
    assert [channel.decode(channel.encode(each)) for each in good] == good
    with pytest.raises(ProtocolError, match=r"bytes is longer than 1048576"):
        channel.encode(m.Reserve({"x" * channel.MAX_SIZE: 1}))
