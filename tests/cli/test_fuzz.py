"""Damaged files: read as far as they are valid, or refused, without any other effect."""

import io
from contextlib import suppress
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastckpt._core.inspect.archive import Archive
from fastckpt._core.inspect.pickled import describe
from fastckpt._core.inspect.tree import read_tree, stored_bytes, tree_of
from fastckpt.errors import BadCheckpoint


def saved(protocol: int = 2) -> bytes:
    with io.BytesIO() as buffer:
        weights = torch.arange(6.0)
        state = {"w": weights, "v": weights.view(2, 3).t(), "f8": weights.to(torch.float8_e5m2), "p": {1: (2.5, None)}}
        torch.save({**state, "d": torch.float16, "s": {1, 2}, "b": b"ab"}, buffer, pickle_protocol=protocol)
        return buffer.getvalue()


SAVED = [saved(), *(bytes(Archive(io.BytesIO(saved(protocol)), "file").pickled()) for protocol in (2, 4))]
"""An archive, and pickles."""
edits = st.lists(
    st.tuples(st.integers(0, 10**6), st.sampled_from(["set", "cut", "add"]), st.binary(min_size=1, max_size=5))
)


def edited(data: bytes, changes: list[tuple[int, str, bytes]]) -> bytes:
    made = bytearray(data)
    for where, how, what in changes:
        at = where % (len(made) + 1)
        made[at : at + (0 if how == "add" else len(what))] = b"" if how == "cut" else what
    return bytes(made)


@settings(max_examples=300)
@given(data=st.sampled_from(SAVED) | st.binary(max_size=300), changes=edits)
@example(data=b"\x80\x02}r\xff\xff\xff\xff.", changes=[])  # a memo of 4 billion
@example(data=b"\x80\x05\x96" + (2**62).to_bytes(8, "little") + b".", changes=[])  # an endless bytearray
@example(data=b"\x80\x02ctorch\nFloatStorage\nQ.", changes=[])  # a persistent id that is none
@example(data=b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02K\x03tR.", changes=[])
@example(data=b"]" * 100_000 + b"a" * 99_999 + b".", changes=[])  # nested deeper than anybody can follow
def test_damaged_pickles_and_archives_are_read_or_refused_as_bad_checkpoints(data, changes):
    data = edited(data, changes)
    for read in (lambda: tree_of(describe(data, "file"), "file"), lambda: read_tree(io.BytesIO(data), "file")):
        with suppress(BadCheckpoint):
            tree: Any = read()
            for entry in tree:
                assert isinstance(entry.name, str) and isinstance(entry.type, str) and repr(entry.value) is not None
            assert stored_bytes(tree) >= 0
