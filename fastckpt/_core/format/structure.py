"""Decomposes a state: into parts that must be equal for two states to share a skeleton, and parts that may differ.

A state of plain containers, tensors and Python leaves falls into

- its *shape*: a flat list of containers, keys, tensor layouts and constants;
- its *numbers*: the int and float leaves, and long lists of them, which have a place of fixed width in a skeleton;
- its *storages*: the bytes of its tensors, each storage once, in the order in which a pickler meets them.

Two states of equal shape have skeletons that differ in the numbers alone. A state that holds anything else
(a user's object, a tensor subclass, a quantized tensor, ...) is *opaque*: nothing is known of its parts.
"""

import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fastckpt._core.format.number_lists import PickledNumbers, pickled_numbers
from fastckpt._core.torch_private.tensors import storage_key

Number = int | float | PickledNumbers
INT64 = 1 << 63

# Each of these, and the containers below, loads with weights_only=True. (Empty bytes do not.)
_CONSTANTS = frozenset({type(None), bool, str, torch.dtype, torch.device, torch.Size})
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})
_PARTS = TENSORS | _CONTAINERS
_APART = frozenset({"meta", "xla", "maia", "mtia"})
"""Devices of tensors that torch pickles without their storages."""
QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


class Opaque(Exception):
    """The state holds an object of unknown parts."""


def first_places(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return for each tensor the place where the same object stands first; its own, unless it stands there again."""
    firsts: dict[int, int] = {}
    return [firsts.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]


class Structure:
    """A state taken apart; raises Opaque where that is not possible, at once or in `check`.

    Taking apart costs about 2 us a tensor. `KnownStructure` spares it at most saves.

    Attributes:
        tensors: Each tensor.
        indices: Of their storages.
        lists: Containers of many numbers, by their ids.
    """

    __slots__ = ("_places", "_seen", "indices", "lists", "numbers", "shape", "storages", "tensors")

    def __init__(self, state: Any) -> None:
        self.shape: list[Any] = []
        self.numbers: list[Number] = []
        self.storages: list[torch.UntypedStorage] = []
        self.tensors: list[torch.Tensor] = []
        self.indices: list[int] = []
        self.lists: dict[int, PickledNumbers] = {}
        self._places: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._visit(state)
        if len(self.storages) < len(self.tensors):  # else each is another one
            self._twins()

    def _twins(self) -> None:
        """Note which of the tensors are one: a pickle holds each once, as a container."""
        places = first_places(self.tensors)
        if len({*places}) < len(places):
            self.shape.append(places)

    def _visit(self, node: Any) -> None:
        kind = type(node)
        if kind in TENSORS:
            self._tensor(node)
        elif kind is float:
            self.shape.append(float)
            self.numbers.append(node)
        elif kind is int and -INT64 <= node < INT64:
            self.shape.append(int)
            self.numbers.append(node)
        elif kind in _CONSTANTS or kind is int:
            self.shape += (kind, node)
        elif kind is complex:
            self.shape += (kind, struct.pack("<dd", node.real, node.imag))  # distinguishes zeros and NaNs
        else:
            self._container(kind, node)

    def _container(self, kind: type, node: Any) -> None:
        if kind not in _CONTAINERS:
            raise Opaque(kind)
        if id(node) in self._seen:
            # a pickle holds a container once, however often it is met
            self.shape += (id, self._seen[id(node)])
            return
        self._seen[id(node)] = len(self._seen)
        if (pickled := pickled_numbers(node)) is not None:
            self.shape += (PickledNumbers, kind, len(pickled))
            self.numbers.append(pickled)
            self.lists[id(node)] = pickled
            return
        self.shape += (kind, len(node))
        if kind is list or kind is tuple:
            self._children(node)
            return
        self._keys(node)
        self._children(node.values())
        if kind is OrderedDict:
            # state_dict() keeps its versions in an attribute, which pickles with it
            self._visit(node.__dict__)

    def _children(self, nodes: Iterable[Any]) -> None:
        visit, tensor = self._visit, self._tensor
        for node in nodes:
            if type(node) in TENSORS:
                tensor(node)
            else:
                visit(node)

    def _keys(self, node: dict[Any, Any]) -> None:
        self.shape += node
        self.shape += map(type, node)
        for key in node:
            if type(key) is not str and type(key) is not int:
                # 0, False, 0.0 and -0.0 are equal, but not the same
                _check_key(key)
                self.shape.append(repr(key))

    def _tensor(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
            index = self._places.setdefault(storage_key(storage), len(self._places))
            if index == len(self.storages):
                self.storages.append(storage)
            self.tensors.append(tensor)
            self.indices.append(index)
            self.shape.append(
                (
                    type(tensor),
                    index,
                    storage.nbytes(),
                    tensor.dtype,
                    tensor.shape,
                    tensor.stride(),
                    tensor.storage_offset(),
                    tensor.requires_grad,
                    tensor.device,
                    tensor.is_neg(),
                    tensor.dtype.is_complex and tensor.is_conj(),
                )
            )
        except (NotImplementedError, RuntimeError) as error:
            raise Opaque("a tensor without strides or storage") from error
        if tensor.__dict__:
            self._attributes(tensor.__dict__)

    def _attributes(self, attributes: dict[str, Any]) -> None:
        """Add the attributes of a tensor, which pickle with it: torch's compiler marks those of compiled optimizers."""
        if any(type(value) not in (str, bool, type(None)) for value in attributes.values()):
            raise Opaque("a tensor with attributes")
        self.shape += (vars, len(attributes), *attributes, *attributes.values())

    def check(self) -> None:
        """Raise Opaque for tensors that torch pickles in ways of their own; equal shapes are equal in this, too."""
        for entry in self.shape:
            is_tensor = type(entry) is tuple and entry[:1] and entry[0] in TENSORS  # else it is a key
            if is_tensor and (entry[3] in QUANTIZED or entry[8].type in _APART):
                raise Opaque(f"a tensor of {entry[3]} on {entry[8]}")


def _check_key(key: Any) -> None:
    if type(key) is tuple:
        for part in key:
            _check_key(part)
    elif type(key) not in _CONSTANTS and type(key) not in (int, float, complex):
        raise Opaque(type(key))


def tensor_paths(state: Any) -> list[str]:
    """The path of each tensor in a state (that is not opaque), such as ``state['model']['weight']``.

    Their order is that of `Structure.tensors`.
    """
    return [path for path, _ in _tensors("state", state, set())]


def _tensors(path: str, node: Any, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    kind = type(node)
    if kind in TENSORS:
        yield path, node
    elif kind in _CONTAINERS and id(node) not in seen:
        seen.add(id(node))
        is_sequence = kind is list or kind is tuple
        # one look at all types in C: there may be many numbers
        if not _PARTS.isdisjoint(map(type, node if is_sequence else node.values())):
            for key, child in enumerate(node) if is_sequence else node.items():
                yield from _tensors(f"{path}[{key!r}]", child, seen)
        if kind is OrderedDict:
            yield from _tensors(f"{path}.__dict__", node.__dict__, seen)


def known_tensors(
    state: Any, storages: Sequence[torch.UntypedStorage], counts: Sequence[int]
) -> tuple[list[torch.Tensor], list[int], list[str]]:
    """Tensors of an opaque state, indices of their storages, as far as nothing else of it is in these; their paths.

    Args:
        counts: Number of tensors of the state in each storage; those in objects of which nothing is known, too.
    """
    found: dict[int, tuple[torch.Tensor, int, str]] = {}
    indices = {storage_key(storage): index for index, storage in enumerate(storages)}
    for path, tensor in _tensors("state", state, set()):
        try:
            index = indices.get(storage_key(tensor.untyped_storage()), -1)
        except (NotImplementedError, RuntimeError):
            continue  # one without a storage
        if index >= 0:
            found.setdefault(id(tensor), (tensor, index, path))
    seen = Counter(index for _, index, _ in found.values())
    known = [each for each in found.values() if seen[each[1]] == counts[each[1]]]
    return [tensor for tensor, *_ in known], [index for _, index, _ in known], [path for *_, path in known]


def with_numbers(state: Any, numbers: Iterable[Number], lists: Mapping[int, PickledNumbers]) -> Any:
    """A copy of a state (that is not opaque) with its numbers, in their order, replaced, and its lists of many."""
    return _rebuild(state, iter(numbers), dict(lists))


def _rebuild(node: Any, numbers: Any, built: dict[int, Any]) -> Any:
    kind = type(node)
    if kind is float or (kind is int and -INT64 <= node < INT64):
        return next(numbers)
    if kind not in _CONTAINERS:
        return node
    if id(node) in built:
        return built[id(node)]
    if kind is tuple:
        built[id(node)] = tuple(_rebuild(child, numbers, built) for child in node)
        return built[id(node)]
    copy = built[id(node)] = kind()
    if kind is list:
        copy.extend(_rebuild(child, numbers, built) for child in node)
    else:
        for key, child in node.items():
            copy[key] = _rebuild(child, numbers, built)
    if kind is OrderedDict:
        copy.__dict__.update(_rebuild(node.__dict__, numbers, built))
    return copy
