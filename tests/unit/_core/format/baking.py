"""Saves a state the way a writer does, into a file that is kept from save to save, and compares what loads."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fastckpt._core.format.plan import Planner
from fastckpt._core.transfer.host_copy import HostCopy
from fastckpt._core.transfer.image import Image


class Baker:
    """One image, as in one slot."""

    def __init__(self, path: Path, *, weights_only: bool = False) -> None:
        self.path = path
        self.planner = Planner(weights_only=weights_only)
        self.image: Image | None = None
        self.filler = HostCopy(2)
        self.files = 0

    def save(self, state: Any) -> None:
        plan = self.planner.plan(state)
        if self.image is None or not plan.skeleton.fits(self.image.size):
            self._new_file(plan.skeleton.capacity())
        assert self.image is not None
        self.filler.fill(self.image.install(plan))

    def _new_file(self, size: int) -> None:
        if self.image is not None:
            self.image.close()
        self.path.unlink(missing_ok=True)
        # what a slot held before must not show through
        self.path.write_bytes(b"\xa5" * size)
        self.image = Image(self.path)
        self.files += 1

    def check(self, state: Any) -> None:
        """Save, and compare what loads with what torch.save and torch.load make of it."""
        want = reference(state)
        self.save(state)
        for mmap in (True, False):
            assert_same(torch.load(self.path, weights_only=False, mmap=mmap), want)

    def close(self) -> None:
        self.filler.close()
        if self.image is not None:
            self.image.close()


def reference(state: Any) -> Any:
    """What torch.save and torch.load make of the state."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def assert_same(got: Any, want: Any, path: str = "state") -> None:
    """Equal bit for bit, in type, structure, layout, and in which storages, tensors and containers are one."""
    _compare(got, want, path, {}, {})


def _compare(got: Any, want: Any, path: str, one: dict[int, int], other: dict[int, int]) -> None:
    assert type(got) is type(want), path
    if isinstance(want, torch.Tensor | Mapping | list | tuple):
        _compare_places(id(got), id(want), path, one, other)
    if isinstance(want, torch.Tensor):
        _compare_tensors(got, want, path, one, other)
    elif isinstance(want, Mapping):
        assert list(got) == list(want), path
        for key in want:
            _compare(got[key], want[key], f"{path}[{key!r}]", one, other)
        if hasattr(want, "__dict__"):
            _compare(vars(got), vars(want), f"{path}.__dict__", one, other)
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), path
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            _compare(a, b, f"{path}[{i}]", one, other)
    elif isinstance(want, float):
        assert got.hex() == want.hex(), path
    elif hasattr(want, "__dict__") and type(want).__eq__ is object.__eq__:
        _compare(vars(got), vars(want), f"{path}.__dict__", one, other)
    else:
        assert got == want, path


def _compare_tensors(got: Any, want: Any, path: str, one: dict[int, int], other: dict[int, int]) -> None:
    for what in ("dtype", "layout", "requires_grad", "is_quantized", "is_sparse", "is_nested"):
        assert getattr(got, what) == getattr(want, what), f"{path}.{what}"
    assert vars(got) == vars(want), path
    if want.layout is not torch.strided or want.is_nested or want.is_quantized:
        assert _bits(got) == _bits(want), path
        return
    assert got.shape == want.shape, path
    assert got.stride() == want.stride() and got.storage_offset() == want.storage_offset(), path
    assert got.is_conj() == want.is_conj() and got.is_neg() == want.is_neg(), path
    assert torch.equal(raw(got), raw(want)), path
    _compare_places(-got.untyped_storage()._cdata, -want.untyped_storage()._cdata, path, one, other)


def _compare_places(got: int, want: int, path: str, one: dict[int, int], other: dict[int, int]) -> None:
    assert one.setdefault(got, len(one)) == other.setdefault(want, len(other)), f"{path} is shared with another"


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage of a tensor."""
    storage = tensor.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu()


def _bits(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    dense = tensor.dequantize() if tensor.is_quantized else tensor
    dense = torch.cat([t.flatten() for t in dense.unbind()]) if dense.is_nested else dense
    torch.save(dense.to_dense() if dense.layout is not torch.strided else dense, buffer)
    return buffer.getvalue()
