"""Memory that copies of other nodes' files need in an arena, before any has come."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from fastckpt._core.byte_sizes import binary
from fastckpt._core.error_codes import coded
from fastckpt._core.memory.headroom import Headroom
from fastckpt._core.policy.replicas.copy_sizes import room

logger = logging.getLogger("fastckpt")

_DIVIDED = (".distcp", "_states.pt")
"""Ends of names of files that one node alone has, of those that can be known before the first save."""


class MakeWay(Protocol):
    """Gives copies back, all of them ``for_good``."""

    def __call__(self, *, for_good: bool) -> None: ...


def _keep(*, for_good: bool) -> None:
    """Nothing is given back."""


class ReplicaRoom:
    """The room for copies: as much as this node's own large files take, for each copy that it keeps, and has kept.

    Each node keeps as many copies as others keep of its own, and divided states have parts of about one size.

    Args:
        copies: How many copies others keep of this node's files, in the round as it is.
        present: Bytes that copies take now.
        make_way: Gives copies back that nobody needs, or all of them, ``for_good``; called in a thread.
        is_optional: Whether copies are left out where there is no room for them.

    Attributes:
        refusal: Why this node keeps no copies; empty while it does.
    """

    def __init__(
        self, copies: Callable[[], float], present: Callable[[], int], make_way: MakeWay = _keep, *, is_optional: bool
    ) -> None:
        self._copies, self._present, self._is_optional = copies, present, is_optional
        self._make_way = make_way
        self._sizes, self.refusal = list[int](), ""

    def ask(self, sizes: Mapping[str, int]) -> None:
        """Ask for room for copies of files as large as these, of this node's ranks."""
        self._sizes = [size for name, size in sizes.items() if name.endswith(_DIVIDED)]

    @property
    def needed(self) -> int:
        """Bytes of all copies."""
        return 0 if self.refusal else room(self._sizes, self._copies())

    @property
    def present(self) -> int:
        """Bytes of these that are there: memory that the copies have already."""
        return min(self.needed, self._present()) if self.needed else 0

    async def settle(self, lacking: Callable[[], Headroom | None]) -> None:
        """Do without copies that are optional where two slots and they do not fit: saves are worth more.

        Args:
            lacking: Finds the limit that does not let two slots and copies have the memory that they need, if any.
        """
        if self._is_optional and self.needed and (found := lacking()):
            self._give_up(found)
        for is_last in (False, True):  # those that are left of a round in which there were some
            if not self.needed and self._present() and lacking():
                await asyncio.to_thread(partial(self._make_way, for_good=is_last))

    def _give_up(self, lacking: Headroom) -> None:
        needed = self.needed
        more = lacking.remedies(needed)
        self.refusal = f"copies need {binary(needed)} beside two slots: {lacking}. {more}"
        text = coded("no copies of other hosts' files are kept here: %s. To do without: --fast-replicas 0", "FC-045")
        logger.warning(text, self.refusal)
