"""Recognizes a state that has the structure of an earlier one: its parts are compared many at a time, in C."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from fastckpt._core.format.number_lists import PickledNumbers, pickled_numbers
from fastckpt._core.format.structure import INT64, TENSORS, Number, Structure, first_places
from fastckpt._core.torch_private.tensors import layout_guard, storage_key

_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})
BLOCK = 512
"""Tensors that are compared at a time."""
_KEYS = frozenset({str, int})
"""Types of keys of which equal ones are the same in a pickle; 0.0 and -0.0 are not."""
_attributes: Callable[[Any], dict[str, Any]] = attrgetter("__dict__")
_Select = Callable[[Sequence[Any]], Sequence[Any]]


class Unsuited(Exception):
    """The structure has something that cannot be compared many at a time."""


class Parts(NamedTuple):
    """The parts of a state that may differ from save to save, in the order in which a pickler meets them."""

    numbers: list[Number]
    storages: list[torch.UntypedStorage]
    tensors: Sequence[torch.Tensor]
    indices: Sequence[int]


class _Level(NamedTuple):
    """Containers of equal depth: each is visited once, at the first place where it stands.

    Attributes:
        keys: Of all dicts, then of all OrderedDicts.
        lengths: Of dicts, OrderedDicts, lists and tuples.
        types: Of the values of all.
        containers: Selects the containers among the values.
        dicts, ordered, sequences: Select containers of the next level.
    """

    keys: list[Any]
    key_types: list[type]
    lengths: list[int]
    types: list[type]
    containers: _Select
    dicts: _Select
    ordered: _Select
    sequences: _Select


class _Nodes(NamedTuple):
    """The containers of one level."""

    dicts: Sequence[dict[Any, Any]]
    ordered: Sequence["OrderedDict[Any, Any]"]
    sequences: Sequence[Sequence[Any]]

    def contents(self) -> tuple[list[Any], list[int], list[Any]]:
        """Keys, lengths and values of all."""
        # By the types' own methods: dict's would give those of an OrderedDict in the order of insertion.
        values = [
            *chain.from_iterable(map(dict.values, self.dicts)),
            *chain.from_iterable(map(OrderedDict.values, self.ordered)),
            *chain.from_iterable(self.sequences),
        ]
        keys = [*chain.from_iterable(self.dicts), *chain.from_iterable(self.ordered)]
        return keys, [*map(len, chain(*self))], values


class KnownStructure:
    """The structure of a state, in the form of lists with which those of a later state are compared.

    `Structure` visits each part by itself, which costs about 2 us a tensor; this costs a third of that. Containers are
    taken apart level by level, all of one depth together, so that each comparison is one of two lists. A state that
    matches has an equal `Structure.shape`, and its parts are found by their places. Another may have an equal one, too.

    It keeps neither tensors nor containers of the state.

    Raises:
        Unsuited: There are keys or values that take more than a comparison, such as complex numbers.
    """

    def __init__(self, state: Any, structure: Structure) -> None:
        recorder = _Recorder(state)
        self._root, self._levels = type(state), recorder.levels
        self._first_ids, self._containers = _selector(recorder.first_ids), len({*recorder.first_ids})
        places = [*recorder.in_order()]
        values = recorder.values
        tensors = [place for place in places if type(values[place]) in TENSORS]
        numbers = [place for place in places if type(values[place]) in _CONTAINERS or _is_number(values[place])]
        constants = sorted({*places} - {*tensors} - {*numbers})
        self._tensors, self._numbers, self._select_constants = map(_selector, (tensors, numbers, constants))
        self._constants = self._select_constants(values)
        if not all(map(_is_comparable, self._constants)):
            raise Unsuited
        self._lists = [(i, len(each)) for i, each in enumerate(structure.numbers) if type(each) is PickledNumbers]
        self._ints = _selector([place for place in numbers if type(values[place]) is int])
        self._know_tensors(structure)
        # Once for each structure: the order of the parts is a pickler's only if it is that of `Structure`.
        found = self.match(state)
        if found is None or not _is_same(found, structure):
            raise Unsuited

    def _know_tensors(self, structure: Structure) -> None:
        tensors = structure.tensors
        self._blocks = [_Block(tensors[start : start + BLOCK]) for start in range(0, len(tensors), BLOCK)]
        self._indices = structure.indices
        firsts = first_places(tensors)
        self._first_places, self._distinct = _selector(firsts), len({*firsts})
        first_of_each = {index: place for place, index in reversed([*enumerate(self._indices)])}
        self._first_of_storage = _selector([first_of_each[index] for index in range(len(structure.storages))])

    def match(self, state: Any) -> Parts | None:
        """The parts of a state of this structure; None for one of another."""
        values = self._values(state)
        if values is None:
            return None
        ints = self._ints(values)
        # a constant among the numbers: pickle writes a larger int in more than eight bytes
        if ints and not -INT64 <= min(ints) <= max(ints) < INT64:
            return None
        if self._select_constants(values) != self._constants:
            return None
        tensors = self._tensors(values)
        storages = self._storages(tensors)
        if storages is None:
            return None
        numbers = self._pickled([*self._numbers(values)])
        return Parts(numbers, storages, tensors, self._indices) if numbers is not None else None

    def _pickled(self, numbers: list[Any]) -> list[Number] | None:
        """Numbers, with long lists of them as pickles; None if one has another length than is known."""
        for index, length in self._lists:
            numbers[index] = pickled = pickled_numbers(numbers[index])
            if pickled is None or len(pickled) != length:
                return None
        return numbers

    def _values(self, state: Any) -> list[Any] | None:
        """The values in all containers, level by level; None if types, lengths or keys differ from the known ones."""
        if type(state) is not self._root:
            return None
        nodes, found, ids = _root(state), list[Any](), [id(state)]
        for level in self._levels:
            keys, lengths, values = nodes.contents()
            # Types first: a key of another type, such as a tensor, may compare to anything, or not at all.
            if lengths != level.lengths or [*map(type, keys)] != level.key_types or keys != level.keys:
                return None
            if [*map(type, values)] != level.types:
                return None
            found += values
            attributes = [*map(_attributes, nodes.ordered)]
            ids += map(id, attributes)
            ids += map(id, level.containers(values))
            nodes = _Nodes([*attributes, *level.dicts(values)], level.ordered(values), level.sequences(values))
        # Which of the containers are one: a pickle holds each once.
        is_alike = [*self._first_ids(ids)] == ids and len({*ids}) == self._containers
        return found if is_alike else None

    def _storages(self, tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage] | None:
        """The storages of the tensors, each once; None if layouts, attributes or storages are not as known."""
        of_each: list[torch.UntypedStorage] = []
        keys: list[int] = []
        for number, block in enumerate(self._blocks):
            found = block.storages(tensors[number * BLOCK : (number + 1) * BLOCK])
            if found is None:
                return None
            of_each += found
            keys += map(storage_key, found)
        of_first = self._first_of_storage(keys)
        if len({*of_first}) < len(of_first):
            return None
        if len(of_first) < len(keys):
            if [*map(of_first.__getitem__, self._indices)] != keys:
                return None
            # Which of the tensors are one, also where they are not in one block; with storages of their own, none are.
            ids = [*map(id, tensors)]
            if [*self._first_places(ids)] != ids or len({*ids}) != self._distinct:
                return None
        return [*self._first_of_storage(of_each)]


class _Block:
    """Tensors that are compared together: few enough that all of them stay in the processor's cache meanwhile."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # The guard takes each tensor once.
        firsts = first_places(tensors)
        distinct = sorted({*firsts})
        self._first_places = firsts if len(distinct) < len(tensors) else []
        self._distinct = _selector(distinct)
        self._guard = layout_guard(self._distinct(tensors))
        self._strides = [tensor.stride() for tensor in tensors]
        self._offsets = [tensor.storage_offset() for tensor in tensors]
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
        self._marks = _marks(tensors)

    def storages(self, tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage] | None:
        """The storage of each tensor; None if layouts, attributes, or sizes of storages are not as they were."""
        distinct = tensors
        if self._first_places:
            distinct = self._distinct(tensors)
            if any(tensor is not tensors[i] for tensor, i in zip(tensors, self._first_places, strict=True)):
                return None
        # Strides first: they raise an error for tensors that have none, such as nested ones, where the guard's C++ code
        # would end the process. The code below takes tensors that have a storage.
        try:
            if [*map(torch.Tensor.stride, tensors)] != self._strides:
                return None
        except (NotImplementedError, RuntimeError):
            return None
        if not self._guard(*distinct) or _marks(tensors) != self._marks:
            return None
        if [*map(torch.Tensor.storage_offset, tensors)] != self._offsets:
            return None
        storages = [*map(torch.Tensor.untyped_storage, tensors)]
        return storages if [*map(torch.UntypedStorage.nbytes, storages)] == self._sizes else None


class _Recorder:
    """Takes a state apart level by level, and records its structure.

    Attributes:
        values: In all containers, level by level.
        first_ids: Of each container that is met, in the order of `KnownStructure._values`, where it was met first.
    """

    def __init__(self, state: Any) -> None:
        if type(state) not in _CONTAINERS:
            raise Unsuited
        self.levels: list[_Level] = []
        self.values: list[Any] = []
        self.first_ids: list[int] = [0]
        self._root = state
        self._met = {id(state): 0}
        self._spans: dict[int, tuple[int, int]] = {}
        nodes = _root(state)
        while any(nodes):
            nodes = self._descend(nodes)

    def _descend(self, nodes: _Nodes) -> _Nodes:
        keys, lengths, values = nodes.contents()
        key_types = [*map(type, keys)]
        if not _KEYS.issuperset(key_types):
            raise Unsuited
        start = len(self.values)
        for node, length in zip(chain(*nodes), lengths, strict=True):
            self._spans[id(node)] = start, start + length
            start += length
        self.values += values
        attributes = [*map(_attributes, nodes.ordered)]
        if not all(map(self._is_new, attributes)):
            raise Unsuited
        containers = [i for i, value in enumerate(values) if type(value) in _CONTAINERS]
        new = [i for i in containers if self._is_new(values[i]) and pickled_numbers(values[i]) is None]
        kinds: dict[type, int] = {dict: 0, OrderedDict: 1, list: 2, tuple: 2}
        dicts, ordered, sequences = (_selector([i for i in new if kinds[type(values[i])] == kind]) for kind in range(3))
        types = [*map(type, values)]
        self.levels.append(_Level(keys, key_types, lengths, types, _selector(containers), dicts, ordered, sequences))
        return _Nodes([*attributes, *dicts(values)], ordered(values), sequences(values))

    def _is_new(self, container: Any) -> bool:
        place = len(self.first_ids)
        self.first_ids.append(self._met.setdefault(id(container), place))
        return self.first_ids[-1] == place

    def in_order(self) -> Iterator[int]:
        """The places of all values that are no containers, in the order in which a pickler meets them."""
        return self._within(self._root, set())

    def _within(self, node: Any, seen: set[int]) -> Iterator[int]:
        if id(node) in seen:
            return
        seen.add(id(node))
        for place in range(*self._spans[id(node)]):
            value = self.values[place]
            if id(value) in self._spans:
                yield from self._within(value, seen)
            elif type(value) not in _CONTAINERS:
                yield place
            elif id(value) not in seen:  # a list of many numbers
                seen.add(id(value))
                yield place
        if type(node) is OrderedDict:
            yield from self._within(node.__dict__, seen)


def _root(state: Any) -> _Nodes:
    kind = type(state)
    return _Nodes(
        [state] if kind is dict else [],
        [state] if kind is OrderedDict else [],
        [state] if kind is list or kind is tuple else [],
    )


def _selector(places: Sequence[int]) -> _Select:
    """Selects the items at these places of a list or tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    # with one index, itemgetter would give the item itself
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0, 0))


def _marks(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The attributes of tensors, which pickle with them; few have any."""
    all_attributes = [*map(_attributes, tensors)]
    if not any(all_attributes):
        return []
    marked = ((place, each) for place, each in enumerate(all_attributes) if each)
    return [(place, *map(type, each.values()), *each.items()) for place, each in marked]


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and -INT64 <= value < INT64)


def _is_comparable(constant: Any) -> bool:
    """Return whether equal ones are the same in a pickle; complex(0.0, -0.0) equals 0."""
    return type(constant) is not complex


def _is_same(parts: Parts, structure: Structure) -> bool:
    return (
        [*map(id, parts.tensors)] == [*map(id, structure.tensors)]
        and [*map(storage_key, parts.storages)] == [*map(storage_key, structure.storages)]
        and [*map(_identity, parts.numbers)] == [*map(_identity, structure.numbers)]
    )


def _identity(number: Number) -> object:
    return number if type(number) is PickledNumbers else id(number)
