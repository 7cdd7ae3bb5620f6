"""Entries of a state that ranks have unlike: each rank's own, saved beside the common state, and put back."""

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fastckpt._core.arguments import abbreviated
from fastckpt._core.error_codes import coded
from fastckpt._core.format.number_lists import pickled_numbers
from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt")

UNLIKE = "unlike"
"""Key, in a rank's own file, of entries that it has unlike others."""
COMPARED = "compared"
"""Key beside that: how many ranks have compared their states, when it was saved."""
WORLD, THERE, ABSENT, ALONE = "world", "there", "absent", "alone"
"""Keys in that: the number of ranks, entries with their paths, and names of entries that this rank lacks. The last key
has names of entries that ranks have in unlike shapes, so that nobody else could load them."""

Path = tuple[Any, ...]
State = Mapping[str, Any]


def entries(state: State) -> Iterator[tuple[str, Path, Any]]:
    """The name of each entry in dictionaries, its path, and its value; a list is one, and so are many numbers."""
    seen: set[str] = set()
    for path, leaf in _leaves(state, ()):
        name = named(path)
        if name in seen:  # keys may have dots, or be of unlike types and of one text
            name = f"{name} {path!r}"
        seen.add(name)
        if path:
            yield name, path, leaf


def named(path: Collection[Any]) -> str:
    """The name of the entry at a path, such as ``optimizer.state.0.exp_avg``."""
    # A text that looks like a number is another key than the number.
    return ".".join(key if isinstance(key, str) and not key.isdecimal() else repr(key) for key in path)


def own_entries(state: State, unlike: Mapping[str, bool], world: int) -> dict[str, Any]:
    """Return the entries of these names, which a rank saves as its own; empty if there are no names.

    Args:
        state: This rank's.
        unlike: Names of entries that ranks have unlike, or of all that a key has, and whether all have them in one
            shape.
        world: The number of ranks.
    """
    if not unlike:
        return {}
    whole = [key for key in state if named((key,)) in unlike]
    there = {named((key,)): [[key], state[key]] for key in whole}
    there |= {
        name: [list(path), leaf] for name, path, leaf in entries(state) if name in unlike and path[0] not in whole
    }
    absent = sorted(unlike.keys() - there.keys())
    return {WORLD: world, THERE: list(there.values()), ABSENT: absent, ALONE: alone_in(unlike)}


def alone_in(unlike: Mapping[str, bool]) -> list[str]:
    """Names of entries that ranks have in unlike shapes."""
    return sorted(name for name, has_shape in unlike.items() if not has_shape)


def own_names(own: Mapping[str, Any]) -> set[str]:
    """Names of the entries in a result of `own_entries`, and of entries that only others have."""
    return {*(named(path) for path, _ in own[THERE]), *own[ABSENT]} if own else set()


def loaded_alone(own: Mapping[str, Any], world: int) -> list[str]:
    """Names of entries that only the ranks that had them can load; raises ConfigError in another number of ranks."""
    alone = own.get(ALONE, [])
    if alone and own[WORLD] != world:
        raise ConfigError(
            f"the checkpoint has {abbreviated(alone)} in another shape of each of {own[WORLD]} ranks, and this job "
            f"has {world}: go on with {own[WORLD]} ranks"
        )
    return list(alone)


def of_another_world(own: Mapping[str, Any], world: int) -> str:
    """A sentence about entries that another number of ranks saved as their own; empty for none."""
    if not own or own[WORLD] == world:
        return ""
    names = abbreviated(sorted(own_names(own)))
    return f"Of {names} each of {own[WORLD]} ranks has saved its own, and this job has {world}: go on with {own[WORLD]}"


def with_own(common: State, own: Mapping[str, Any], world: int, rank: int) -> dict[str, Any]:
    """A state as this rank had it, of the common state, and its own.

    Args:
        common: State that was saved for all, as it was loaded; its dictionaries are changed.
        own: Result of `own_entries`; empty for none.
        world: The number of ranks now: in another number none gets its own entries.
        rank: This rank.
    """
    if not own:
        return dict(common)
    if own[WORLD] != world:
        if rank == 0:
            text = "%d ranks saved their own of %s, and this job has %d: all load what the first one had"
            logger.warning(coded(text, "FC-021"), own[WORLD], abbreviated(sorted(own_names(own))), world)
        return dict(common)
    kept = dict(common)
    for path in [path for name, path, _ in entries(common) if name in own[ABSENT] or named(path[:1]) in own[ABSENT]]:
        _drop(kept, path)
    for path, leaf in own[THERE]:
        _put(kept, tuple(path), leaf)
    return kept


def without(state: State, names: Collection[str]) -> dict[str, Any]:
    """A state without the entries of these names."""
    kept: dict[str, Any] = {}
    for name, path, leaf in entries(state):
        if name not in names:
            _put(kept, path, leaf)
    return kept


def without_alone(states: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """States without entries of these names; each dictionary stays, and is of the type that it has."""
    if not names:
        return states
    kept = without(states, names)
    return {
        name: type(state)(kept.get(name, {})) if isinstance(state, dict) else state
        for name, state in states.items()
        if name in kept or isinstance(state, dict)
    }


def shared_shards(states: dict[str, Any], own: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the state that a rank adds to a save of shards, beside its ``own``.

    Of the entries that all ranks have unlike, the first rank's are saved there.

    Groups of parameters stay on all ranks, which see by them whether they have one model.
    """
    if rank == 0:
        return without_alone(states, own[ALONE])
    paths = {tuple(path) for path, _ in own[THERE]}
    mine = {name for name, path, _ in entries(states) if path in paths or path[:1] in paths}
    return without_alone(states, {name for name in mine if "param_groups" not in name} | {*own[ALONE]})


def _leaves(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(node, Mapping) and node and pickled_numbers(node) is None:
        for key, child in node.items():
            yield from _leaves(child, (*path, key))
    else:
        yield path, node


def _put(state: dict[str, Any], path: Path, leaf: Any) -> None:
    node: Any = state
    for key in path[:-1]:
        node = node.setdefault(key, {})
    node[path[-1]] = leaf


def _drop(state: dict[str, Any], path: Path) -> None:
    """Remove an entry, and the dictionaries that have no others."""
    nodes: list[Any] = [state]
    for key in path[:-1]:
        nodes.append(nodes[-1][key])
    for node, key in zip(reversed(nodes), reversed(path), strict=True):
        del node[key]
        if node:
            return
