"""Any state that torch.save takes comes back as torch.load would give it, however it changed since the last save."""

import math
import struct
from collections import OrderedDict
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit._core.format.baking import Baker, reference

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


class Custom:
    """A user's object, with a tensor inside."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.tensor = torch.tensor([1.5, 2.5])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = math.prod(shape) + draw(st.sampled_from([0, 0, 3, 9000]))
    raw = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8)
    storage = raw.view(dtype) if count else torch.empty(0, dtype=dtype)
    offset = draw(st.integers(0, count - math.prod(shape)))
    tensor = storage[offset : offset + math.prod(shape)].view(shape)
    kind = draw(st.sampled_from(["plain", "plain", "transposed", "parameter", "strided", "conjugate"]))
    if kind == "transposed" and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1)
    elif kind == "parameter" and (dtype.is_floating_point or dtype.is_complex):
        tensor = torch.nn.Parameter(tensor, requires_grad=draw(st.booleans()))
    elif kind == "strided" and tensor.dim() and tensor.shape[0] > 1:
        tensor = tensor[::2]
    elif kind == "conjugate" and dtype.is_complex:
        tensor = tensor.conj()
    return tensor


EDGES = [2**63, -(2**63), 2**63 - 1, 2**31, 10**30, 0.0, -0.0, math.nan, math.inf]
NUMBERS = st.one_of(st.integers(), st.integers(-3, 3), st.floats(), st.sampled_from(EDGES))
CONSTANTS = [torch.float32, torch.device("cpu"), torch.Size([2, 3]), {1, 2}, frozenset({3}), range(3)]
LEAVES = st.one_of(
    tensors(),
    NUMBERS,
    st.none() | st.booleans() | st.text(max_size=5) | st.binary(max_size=5) | st.complex_numbers(allow_nan=False),
    st.sampled_from(CONSTANTS) | st.builds(Custom, st.integers(0, 9)),
)
KEYS = st.one_of(st.text(max_size=4), st.integers(-5, 5), st.tuples(st.integers(0, 3), st.text(max_size=2)))
STATES = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(KEYS, children, max_size=4),
        st.dictionaries(KEYS, children, max_size=3).map(OrderedDict),
        st.lists(children, min_size=1, max_size=2).map(lambda items: [items, items]),
    ),
    max_leaves=10,
)
SOME = settings(max_examples=20, suppress_health_check=list(HealthCheck))


def change_bytes(node: Any) -> None:
    """Train: new bytes in the same tensors."""
    if isinstance(node, torch.Tensor) and node.layout is torch.strided:
        storage = torch.empty(0, dtype=torch.uint8).set_(node.detach().untyped_storage())
        storage.copy_(torch.randint(0, 2, storage.shape, dtype=torch.uint8))
    elif isinstance(node, dict):
        for child in node.values():
            change_bytes(child)
    elif isinstance(node, list | tuple):
        for child in node:
            change_bytes(child)


def check(baker: Baker, state: Any) -> None:
    """What torch refuses to save is refused alike."""
    try:
        reference(state)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="view the same data as different types"):
            baker.save(state)
    else:
        baker.check(state)


@SOME
@given(states=st.lists(STATES, min_size=1, max_size=3))
def test_every_state_loads_as_torch_saves_it(states: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    with closing(Baker(tmp_path_factory.mktemp("image") / "model.pt")) as baker:
        for state in states:
            check(baker, state)
            change_bytes(state)
            check(baker, state)


def test_a_marker_is_not_confused_with_bytes_that_look_like_one(tmp_path: Path) -> None:
    """Strings full of opcode bytes stand beside numbers; each number is still found exactly once."""
    noise = b"\x8a\x08" + bytes(range(256)) + b"G" * 64
    lr = struct.unpack(">d", noise[2:10])[0]
    with closing(Baker(tmp_path / "model.pt")) as baker:
        for step in (1, 2**62, -1):
            baker.check({"noise": noise, "text": noise.decode("latin1"), "step": step, "lr": lr})
