"""The tree of names in a state: the type, shape and value of each, without tensor bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias

from fastckpt._core.inspect.contents import contents
from fastckpt._core.inspect.pickled import Object, Tensor
from fastckpt.errors import BadCheckpoint

MOST = 10_000_000
"""Entries of a state that are read, at most: a pickle of a few bytes can describe more than fit into memory."""


@dataclass(frozen=True)
class Group:
    """A container.

    Attributes:
        kind: Its type, such as "dict".
        count: Number of its entries.
    """

    kind: str
    count: int


@dataclass(frozen=True)
class TreeEntry:
    """One name of a state.

    Attributes:
        keys: The way to it from the top.
        value: A container, which comes before its contents, a tensor, or the value itself.
    """

    keys: tuple[Any, ...]
    value: Any

    @property
    def name(self) -> str:
        """The keys joined by dots, as in ``model.layers.0.weight``."""
        return ".".join(key if isinstance(key, str) else repr(key) for key in self.keys)

    @property
    def type(self) -> str:
        """The type of the value: of a tensor's elements, of a container, or of the value itself."""
        match self.value:
            case Tensor():
                return self.value.dtype
            case Group():
                return self.value.kind
            case Object():
                return self.value.name
        return "global" if isinstance(self.value, type) else type(self.value).__name__


Tree: TypeAlias = list[TreeEntry]


def read_tree(file: BinaryIO, name: str) -> Tree:
    """All entries of the state in a file, in its order; raises BadCheckpoint, naming the file, if it is damaged."""
    return tree_of(contents(file, name).state(), name)


def tree_of(state: Any, name: str) -> Tree:
    """The entries of a state that `describe` gave; raises BadCheckpoint for one without an end."""
    left = MOST

    def walk(keys: tuple[Any, ...], node: Any, above: tuple[int, ...]) -> Tree:
        nonlocal left
        left -= 1
        if left < 0:
            raise BadCheckpoint(f"the state in {name} has more than {MOST} entries")
        children = _children(node)
        if children is None:
            return [TreeEntry(keys, node)]
        if id(node) in above:
            return [TreeEntry(keys, Object("a container that holds itself"))]
        held = [entry for key, child in children for entry in walk((*keys, key), child, (*above, id(node)))]
        if isinstance(node, Object) and not any(isinstance(entry.value, Tensor) for entry in held):
            return [TreeEntry(keys, node)]
        kind = node.name if isinstance(node, Object) else type(node).__name__
        return [TreeEntry(keys, Group(kind, len(children))), *held]

    try:
        return walk((), state, ())
    except RecursionError as error:
        raise BadCheckpoint(f"the state in {name} is nested too deeply") from error


def stored_bytes(tree: Tree) -> int:
    """Bytes of all tensors of a tree; a storage that several tensors share is counted once."""
    storages = {e.value.storage.key: e.value.storage for e in tree if isinstance(e.value, Tensor) and e.value.storage}
    return sum(storage.size for storage in storages.values())


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    """The children of a container, by key; None if it is none."""
    match node:
        case Tensor() | str() | bytes():
            return None
        case Mapping():
            return list(node.items())
        case list() | tuple():
            return list(enumerate(node))
        case Object():
            parts = [(f"({i})", part) for i, part in enumerate(node.parts)]
            return [*parts, *node.entries.items(), *([("(state)", node.state)] if node.state is not None else [])]
    return None
