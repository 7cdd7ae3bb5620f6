"""Arbitrary files in place of safetensors files: tensors, or BadCheckpoint with the name of the file."""

import io
import json
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from fastckpt._core.inspect.contents import contents
from fastckpt._core.inspect.pickled import Tensor
from fastckpt._core.inspect.tree import tree_of
from fastckpt._core.inspect.values import elements
from fastckpt.errors import BadCheckpoint
from tests.fuzz.mutations import PIECES, mutated, mutations
from tests.support.tables import for_each

NAME = "a/model.safetensors"
GOOD = [
    save({"w": torch.arange(12.0).view(3, 4), "n.b": torch.arange(5), "e": torch.empty(0, 3)}, {"format": "pt"}),
    save({"half": torch.ones(3, dtype=torch.bfloat16), "scalar": torch.tensor(7)}),
    save({}),
]
FIELDS = [b'"dtype":', b'"shape":', b'"data_offsets":', b'"__metadata__":', b'"F32"', b'"BF16"', b'"w":', b"\xff" * 8]


def read(data: bytes) -> dict[str, list[Any]]:
    """All elements of all tensors."""
    found = contents(io.BytesIO(data), NAME)
    tensors = [entry for entry in tree_of(found.state(), NAME) if isinstance(entry.value, Tensor)]
    assert len(tensors) < 1000 and all(entry.name.encode() for entry in tensors)
    read = {entry.name: [each.tolist() for each in elements(found, entry.value)] for entry in tensors}
    assert sum(len(block) for blocks in read.values() for block in blocks) <= len(data)
    return read


def packed(header: bytes | dict[str, Any] | list[Any], data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def w(**fields: Any) -> bytes:
    return packed({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields})


def two(*offsets: list[int], data: int = 8) -> bytes:
    entries = {f"t{i}": {"dtype": "F32", "shape": [1], "data_offsets": each} for i, each in enumerate(offsets)}
    return packed(entries, bytes(data))


TWICE = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}'
LIES = {
    "an empty file": b"",
    "a header longer than the file": packed({}, b"", 1000),
    "a header of 2**64 - 1 bytes": packed({}, b"", 2**64 - 1),
    "dicts in 100,000 levels": packed(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "metadata in 100,000 levels": packed(b'{"__metadata__":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}", b""),
    "metadata that are none": packed({"__metadata__": [1]}, b""),
    "a list": packed([1]),
    "a name twice": packed(TWICE),
    "a field twice": packed(b'{"w":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}'),
    "bytes that are no UTF-8": packed(b'{"\xff\xfe":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    "half of a character": packed(b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    "a tensor that is none": packed({"w": 5}),
    "a dtype that is unknown": w(dtype="F128"),
    "a shape that is true": w(shape=[True, 2]),
    "a shape of 5,000 digits": packed(b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}'),
    "sizes whose product takes long": w(shape=[10**4200] * 64),
    "a shape of 2**62 and none": packed({"w": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}}, b""),
    "a shape that overflows to what is there": w(shape=[2**62, 2**2 + 2]),
    "a shape with a negative size": w(shape=[-1, -2]),
    "a shape of 100,000 dimensions": w(shape=[2, *[1] * 100_000]),
    "offsets of another kind": w(data_offsets=["0", "8"]),
    "an offset that ends before it begins": w(data_offsets=[8, 0]),
    "an offset behind the end": w(data_offsets=[8, 16]),
    "tensors that overlap in part": two([0, 4], [2, 6]),
    "a gap between tensors": two([0, 4], [8, 12], data=12),
    "bytes after the last": two([0, 4], [4, 8], data=9),
    "a last tensor that is cut off": two([0, 4], [4, 8], data=7),
}  # fmt: skip


@for_each(*LIES.items())
def test_a_header_that_lies_is_refused_by_the_name_of_the_file_and_costs_little(kind: str, data: bytes):
    tracemalloc.start()
    try:
        with pytest.raises(BadCheckpoint, match=NAME) as error:
            read(data)
        assert tracemalloc.get_traced_memory()[1] < (64 << 20) and len(str(error.value)) < 1000, kind
    finally:
        tracemalloc.stop()


def test_files_of_the_library_are_read():
    assert read(GOOD[0]) == {"w": [[float(i) for i in range(12)]], "n.b": [[0, 1, 2, 3, 4]], "e": []}
    assert {*read(GOOD[1])} == {"half", "scalar"} and read(GOOD[2]) == {}
    assert read(two([4, 8], [0, 4])) == {"t0": [[0.0]], "t1": [[0.0]]}


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(GOOD), mutations([*PIECES, *FIELDS]))
def test_damaged_files_are_refused_or_read(good, changes):
    try:
        read(mutated(good, changes))
    except BadCheckpoint as error:
        assert NAME in str(error)
