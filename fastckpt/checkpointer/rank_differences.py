"""Entries of a state saved by one rank for all that ranks have unlike: found by digests, and kept of each rank."""

import itertools
import logging
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fastckpt._core.client.collective import Agreement, PeerDeparted, agreement
from fastckpt._core.client.state_digest import digest_of, is_shard
from fastckpt._core.config import RankInfo
from fastckpt._core.error_codes import coded
from fastckpt._core.format.number_lists import pickled_numbers
from fastckpt._core.torch_private.tensors import compiled_module
from fastckpt.checkpointer.state import unwrapped

logger = logging.getLogger("fastckpt")

EVERY = 100
"""Calls of `RankDifferences.turn` after the first one, after which a part of the state is compared again."""
PARTS = 8
"""Parts in which the whole is compared again: each has every eighth entry."""
PATIENCE = 30.0
"""Seconds that a rank may be later than others at a comparison; one that makes no steps never comes."""
UNLIKE = "unlike"
"""Key, in a rank's own state, of what it has unlike others."""
WORLD, THERE, ABSENT, ALONE = "world", "there", "absent", "alone"
"""Keys in that: the number of ranks, entries with their paths, and names of entries that this rank lacks, and of those
that ranks have in unlike shapes, so that nobody else could load them."""

_NUMBERS = itertools.count()

Path = tuple[Any, ...]
State = Mapping[str, Any]


class RankDifferences:
    """Compares the state that ranks have in common, which is saved from one of them: all of it at first, then parts.

    All ranks call `begin` and `turn`, the same number of times. An entry is what dictionaries lead to, such as
    ``optimizer.state.0.exp_avg``; a list is one entry, and so is a dict of many numbers. Shards are not compared.

    Args:
        place: Of this rank in the job.
        ignored: Names of entries that ranks need not have alike.
        staged: Whether this rank has a stage of a pipeline: then nothing is compared, on any rank.

    Attributes:
        unlike: Names of entries that ranks have unlike, and whether all have them in one shape.
    """

    def __init__(self, place: RankInfo, ignored: Collection[str] = (), *, staged: bool = False) -> None:
        self._staged = staged
        self._rank, self._world, self._ignored = place.rank, place.world_size, frozenset(ignored)
        self._name = f"differences {next(_NUMBERS)}"
        self._ranks: Agreement | None = None
        self._turn = self._next = 0
        self._parts = itertools.cycle(range(PARTS))
        self.unlike: dict[str, bool] = {}

    def begin(self) -> None:
        """Compare all from now on: another state was loaded, or none."""
        self._turn, self._next, self.unlike = 0, EVERY, {}
        if self._world > 1:
            self._ranks = agreement(self._world, self._name)

    def leave(self) -> None:
        """Compare nothing any more; no rank waits for this one."""
        if self._ranks is not None:
            self._ranks.leave()
        self._ranks = None

    def turn(self, state: Callable[[], State], *, saves: bool) -> None:
        """Compare what is due to be compared after this step; ``saves`` if the step is saved, on all ranks alike.

        Once a rank has closed, or has not come in time, nothing is compared any more.
        """
        self._turn += 1
        is_first = self._turn == 1
        if self._ranks is None or not (is_first or (saves and self._turn >= self._next)):
            return
        # 1. all of the state at first, then a part of it   2. where digests differ: which entries they are of
        self._next = self._turn + EVERY
        try:
            sent = {} if self._staged else self._digests(state(), None if is_first else next(self._parts))
            found = self._ranks.gather("" if self._staged else _digest_of_all(sent), PATIENCE)
            if "" in found:
                self.leave()
            elif len(set(found)) > 1:
                self._keep(unlike_entries(self._ranks.gather(sent, PATIENCE)))
        except (PeerDeparted, dist.DistError) as error:
            logger.info("the states of ranks are not compared any more: %s", error)
            self.leave()

    def own(self, state: State) -> dict[str, Any]:
        """The part of this rank's own state that has its unlike entries; empty if there are none."""
        if not self.unlike:
            return {}
        there = {name: [list(path), leaf] for name, path, leaf in _entries(state) if name in self.unlike}
        absent = sorted(self.unlike.keys() - there.keys())
        alone = sorted(name for name, has_shape in self.unlike.items() if not has_shape)
        return {UNLIKE: {WORLD: self._world, THERE: list(there.values()), ABSENT: absent, ALONE: alone}}

    def _digests(self, state: State, part: int | None = None) -> dict[str, str]:
        chosen = (
            (name, leaf)
            for name, _, leaf in _entries(state)
            if name not in self._ignored
            and not is_shard(leaf)
            and (part is None or zlib.crc32(name.encode()) % PARTS == part)
        )
        return {name: digest_of(leaf) for name, leaf in chosen}

    def _keep(self, unlike: dict[str, bool]) -> None:
        fresh = sorted(unlike.keys() - self.unlike.keys())
        self.unlike |= unlike
        if fresh and self._rank == 0:
            logger.warning(
                "ranks have unlike %s%s: of each rank its own is saved, and loaded in a job of %d ranks",
                fresh[0],
                f" and {len(fresh) - 1} more" if fresh[1:] else "",
                self._world,
            )


def unlike_entries(digests: list[dict[str, str]]) -> dict[str, bool]:
    """Names of entries that are not the same in all ranks, and whether all have them in one shape."""
    names = dict.fromkeys(name for each in digests for name in each)
    found = {name: {each.get(name, "") for each in digests} for name in names}
    return {
        name: len({digest.partition(":")[0] for digest in values}) == 1
        for name, values in found.items()
        if len(values) > 1
    }


def with_own(common: State, own: Mapping[str, Any], world: int, rank: int) -> dict[str, Any]:
    """A state as this rank had it, of what was saved for all, and its own.

    Args:
        common: What was saved for all, as it was loaded; its dictionaries are changed.
        own: The rank's own state, which may have what `RankDifferences.own` gave.
        world: The number of ranks now: in another number none has what it had.
        rank: This rank.
    """
    unlike = own.get(UNLIKE)
    if not unlike:
        return dict(common)
    there = {_name(path): (tuple(path), leaf) for path, leaf in unlike[THERE]}
    names = [*there, *unlike[ABSENT]]
    if unlike[WORLD] != world:
        if rank == 0:
            text = "%d ranks saved their own of %s%s, and this job has %d: all load what the first one had"
            more = f" and {len(names) - 1} more" if names[1:] else ""
            logger.warning(coded(text, "FC-021"), unlike[WORLD], names[0], more, world)
        return dict(common)
    kept = dict(common)
    for path in [path for name, path, _ in _entries(common) if name in unlike[ABSENT]]:
        _drop(kept, path)
    for path, leaf in there.values():
        _put(kept, path, leaf)
    return kept


def broadcast_buffers(model: torch.nn.Module) -> set[str]:
    """Names of entries that DistributedDataParallel makes equal before each forward, and not after it."""
    wrapper: Any = compiled_module(model) or model
    if not (isinstance(wrapper, DistributedDataParallel) and wrapper.broadcast_buffers):
        return set()
    return {_name(("model", name)) for name, _ in unwrapped(wrapper).named_buffers()}


def without(state: State, names: Collection[str]) -> dict[str, Any]:
    """A state without the entries of these names."""
    kept: dict[str, Any] = {}
    for name, path, leaf in _entries(state):
        if name not in names:
            _put(kept, path, leaf)
    return kept


def _digest_of_all(digests: Mapping[str, str]) -> str:
    return digest_of([[name, digests[name]] for name in sorted(digests)])


def _entries(state: State) -> Iterator[tuple[str, Path, Any]]:
    """The name of each entry, its path, and what is there."""
    return ((_name(path), path, leaf) for path, leaf in _leaves(state, ()))


def _name(path: Collection[Any]) -> str:
    # A text that looks like a number is another key than the number.
    return ".".join(key if isinstance(key, str) and not key.isdecimal() else repr(key) for key in path)


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
