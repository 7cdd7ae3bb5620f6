"""A checksum of a sample's content, to compare two readings of a stream."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
import xxhash

PIECES = 20_000
"""Parts of a sample that count, so that no sample takes long."""
DEPTH = 8
"""Containers within each other that are looked into."""
_PLAIN = (bool, int, float, complex, str, type(None))
_CANNOT_BE_READ = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def checksum(sample: Any) -> int:
    """A number from 0 below 2**63, the same in every process for equal content.

    Counts content that can be compared: numbers, text, bytes, tensors, arrays, images, containers of these, and
    attributes of other objects. One without these counts by its type; one that reads its content later reads it now.
    """
    hasher = xxhash.xxh3_64()
    for piece in itertools.islice(_pieces(sample, DEPTH), PIECES):
        hasher.update(piece)
    # 63 bits fit into a signed integer of a checkpoint.
    return int(hasher.intdigest()) >> 1


def _pieces(node: Any, depth: int) -> Iterator[Any]:
    """The content as bytes, each part after its type."""
    yield type(node).__qualname__.encode()
    if isinstance(node, _PLAIN):
        yield repr(node).encode()
    elif isinstance(node, bytes | bytearray | memoryview):
        yield bytes(node)
    elif depth and (children := _children(node)) is not None:
        # A list of numbers at once: piece by piece it would use up PIECES.
        if set(map(type, children)) <= set(_PLAIN):
            yield repr(children).encode()
            return
        yield str(len(children)).encode()
        for child in children:
            yield from _pieces(child, depth - 1)
    else:
        yield from _content(node)


def _children(node: Any) -> list[Any] | None:
    """The children of a container or an object, in an order of its own; None if it has content at once."""
    if _has_objects(node):
        return [node.shape, node.tolist()]
    if isinstance(node, torch.Tensor) or hasattr(node, "tobytes"):
        return None
    if isinstance(node, list | tuple):
        return list(node)
    if isinstance(node, Set):
        # Sets of strings have another order in each process, because Python randomizes their hashes.
        return sorted(checksum(each) for each in node)
    items = node if isinstance(node, Mapping) else _attributes(node)
    return None if items is None else [part for item in items.items() for part in item]


def _attributes(node: Any) -> Mapping[str, Any] | None:
    if dataclasses.is_dataclass(node):
        return {field.name: getattr(node, field.name, None) for field in dataclasses.fields(node)}
    return None if isinstance(node, type) else getattr(node, "__dict__", None)


def _has_objects(node: Any) -> bool:
    """Return whether it is an array of Python objects, whose bytes are addresses."""
    return bool(getattr(getattr(node, "dtype", None), "hasobject", False))


def _content(node: Any) -> Iterator[Any]:
    """The bytes of a tensor, an array or an image; nothing of other objects."""
    try:
        if isinstance(node, torch.Tensor):
            yield f"{node.dtype}{tuple(node.shape)}".encode()
            plain = node.detach().cpu().resolve_conj().resolve_neg().contiguous()
            yield plain.reshape(-1).view(torch.uint8).numpy().data
        elif hasattr(node, "tobytes"):
            yield f"{[getattr(node, name, None) for name in ('dtype', 'typecode', 'mode', 'shape', 'size')]}".encode()
            yield node.tobytes()
    # An unreadable object counts by its type: a checksum must not stop a stream that training can read.
    except _CANNOT_BE_READ:
        return
