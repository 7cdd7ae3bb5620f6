"""Lays out safetensors files, byte for byte as the safetensors library writes them, but for tensors' bytes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fastckpt._core.format.plan import Plan
from fastckpt._core.format.raw import Exact
from fastckpt._core.format.skeleton import Gap, Skeleton
from fastckpt._core.format.types import SAFETENSORS
from fastckpt._core.format.views import bytes_of, side_by_side
from fastckpt.errors import NotLoadable

ALIGNMENT = 8
"""Bytes that the data begins at a multiple of: spaces at the end of the header see to it."""
DTYPES = {getattr(torch, name): code for name, code in SAFETENSORS.items()}
_ORDER = {dtype: index for index, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class Tensors:
    """The tensors and metadata of a safetensors file.

    Attributes:
        tensors: By name, on any device; of each only the elements are saved, not the rest of its storage.
        metadata: Texts by name, such as ``{"format": "pt"}``, without which transformers refuses a file.
    """

    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)


class SafetensorsPlanner:
    """Plans the saves of one safetensors file, and remembers its header."""

    def __init__(self) -> None:
        self._layout: list[tuple[str, torch.dtype, torch.Size]] = []
        self._metadata: dict[str, str] = {}
        self._names: list[str] = []
        self._skeleton: Skeleton | None = None

    def plan(self, state: Tensors) -> Plan:
        """Plan a save; raises NotLoadable for a tensor that the format cannot hold, and names it."""
        layout = [(name, tensor.dtype, tensor.shape) for name, tensor in state.tensors.items()]
        if (layout, state.metadata) != (self._layout, self._metadata):
            self._names = sorted(state.tensors, key=lambda name: (-_order(name, state.tensors[name]), name))
            self._layout, self._metadata, self._skeleton = layout, dict(state.metadata), None
        tensors = [_plain(name, state.tensors[name]) for name in self._names]
        if self._skeleton is None:
            self._skeleton = _sketch(dict(zip(self._names, tensors, strict=True)), state.metadata)
        device = next((tensor.device for tensor in tensors if not tensor.is_cpu), None)
        storages = [bytes_of(tensor) for tensor in tensors]
        return Plan(self._skeleton, [], storages, tensors, range(len(tensors)), self._names, device)


def _order(name: str, tensor: torch.Tensor) -> int:
    if tensor.dtype not in _ORDER:
        raise NotLoadable(f"safetensors files cannot hold {name!r}, a tensor of {tensor.dtype}")
    return _ORDER[tensor.dtype]


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    plain = side_by_side(tensor)
    if plain is None:
        kind = f"{type(tensor).__name__} of layout {tensor.layout}"
        raise NotLoadable(f"safetensors files cannot hold {name!r}, a {kind}")
    return plain


def _sketch(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Skeleton:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    places: list[tuple[int, int]] = []
    end = 0
    for name, tensor in tensors.items():
        places.append((end, tensor.nbytes))
        end += tensor.nbytes
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end - tensor.nbytes, end],
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    start = 8 + len(text)
    gaps = tuple(Gap(start + offset, size) for offset, size in places)
    return Exact(((0, len(text).to_bytes(8, "little") + text),), start + end, gaps, ())
