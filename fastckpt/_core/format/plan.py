"""Plans the next save of a state, from the last one where only numbers and bytes have changed."""

import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastckpt._core.format.known_structure import KnownStructure, Parts, Unsuited
from fastckpt._core.format.loadable import add_path, check_loadable, check_own, globals_named, innermost
from fastckpt._core.format.skeleton import Skeleton, sketch, sketch_structure
from fastckpt._core.format.structure import Number, Opaque, Structure, known_tensors, tensor_paths
from fastckpt.errors import NotLoadable

logger = logging.getLogger("fastckpt")

WARNED = 50_000
"""Single numbers of a state from which on a warning names them: a second for 100,000 in each save that has others."""


@dataclass(frozen=True)
class Plan:
    """All that a save needs: the skeleton, and the contents of its places and gaps.

    The storages are alive as long as the plan is: drop it once they are copied.

    Attributes:
        tensors: Each tensor of the state; if the state is opaque, only tensors that share their storages with no other
            part of it.
        indices: Of their storages.
        paths: Path of each tensor in the state.
        device: An accelerator in whose memory some of the storages are; None if none is.
    """

    skeleton: Skeleton
    numbers: list[Number]
    storages: list[torch.UntypedStorage]
    tensors: Sequence[torch.Tensor] = ()
    indices: Sequence[int] = ()
    paths: Sequence[str] = ()
    device: torch.device | None = None


class Planner:
    """Plans the saves of one file, and remembers the skeleton of the last one.

    Pickling a skeleton costs about 24 us a tensor; comparing a state with the last one costs about 0.5 us.
    """

    def __init__(self, *, weights_only: bool = True) -> None:
        self._weights_only = weights_only
        self._checked: frozenset[bytes] | None = None
        self._shape: list[Any] | None = None
        self._skeleton: Skeleton | None = None
        self._paths: list[str] = []
        self._device: torch.device | None = None
        self._known: KnownStructure | None = None
        self._is_unsuited = self._has_warned = False

    def plan(self, state: Any) -> Plan:
        """Plan a save of ``state``.

        Raises:
            NotLoadable: It would save, but not load, or not with ``weights_only=True``; names the key.
            Exception: Any error of torch.save for a state that it cannot pickle, with a note that names the key.
        """
        try:
            return self._plan(state)
        except NotLoadable:
            raise
        except Exception as error:
            add_path(error, state)
            raise

    def _plan(self, state: Any) -> Plan:
        try:
            skeleton, parts = self._parts(state)
            return Plan(skeleton, *parts, self._paths, self._device)
        except (Opaque, RecursionError):
            skeleton, storages, counts = sketch(state)
            check_own(state, skeleton)
            self._check(state, skeleton)
            return Plan(skeleton, [], storages, *known_tensors(state, storages, counts), _device(storages))

    def _parts(self, state: Any) -> tuple[Skeleton, Parts]:
        """The skeleton of a state that is not opaque, made if its structure is a new one, and its parts."""
        if self._skeleton is not None and self._known is not None and (parts := self._known.match(state)) is not None:
            return self._skeleton, parts
        structure = Structure(state)
        if self._skeleton is None or structure.shape != self._shape:
            structure.check()
            self._warn_of_numbers(state, len(structure.numbers))
            skeleton, paths = sketch_structure(state, structure), tensor_paths(state)
            self._skeleton, self._shape, self._paths = skeleton, structure.shape, paths
            self._device = _device(structure.storages)
            self._known, self._is_unsuited = None, False
        elif not self._is_unsuited:
            # Only once a structure comes back: of one that changes at each save this would be a waste.
            with contextlib.suppress(Unsuited):
                self._known = KnownStructure(state, structure)
            self._is_unsuited = self._known is None
        return self._skeleton, Parts(structure.numbers, structure.storages, structure.tensors, structure.indices)

    def _warn_of_numbers(self, state: Any, count: int) -> None:
        """Warn once of where a state has many single numbers."""
        if self._has_warned or count < WARNED:
            return
        self._has_warned = True
        path, _ = innermost("state", state, lambda part: _numbers_in(part) > count // 2)
        logger.warning(
            "%s has most of %d numbers, each in a small list, tuple or dict: a save that finds more or fewer of them "
            "takes about %.0f s. Keep one long list for each kind of number, or a tensor: that takes milliseconds",
            path,
            count,
            max(1, count / 100_000),
        )

    def _check(self, state: Any, skeleton: Skeleton) -> None:
        """Check an opaque state if its pickle names globals that none before did; others have only parts that load."""
        if not self._weights_only:
            return
        named = globals_named(skeleton)
        if self._checked is None or not named <= self._checked:
            check_loadable(state, skeleton)
            self._checked = named | (self._checked or frozenset())


def _device(storages: Iterable[torch.UntypedStorage]) -> torch.device | None:
    return next((storage.device for storage in storages if storage.device.type != "cpu"), None)


def _numbers_in(part: Any) -> int:
    try:
        return len(Structure(part).numbers)
    except (Opaque, RecursionError):
        return 0
