"""Room that copies of other nodes' files need, in an arena or on a disk, before any has come."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

from fastckpt._core.byte_sizes import binary
from fastckpt._core.error_codes import coded
from fastckpt._core.memory.copies_folder import CopiesFolder
from fastckpt._core.memory.headroom import Headroom, headroom
from fastckpt._core.policy.replicas.copy_sizes import room
from fastckpt.errors import ArenaTooSmall

logger = logging.getLogger("fastckpt")

_DIVIDED = (".distcp", "_states.pt")
"""Ends of names of files that one node alone has, as far as they are known before the first save."""


class MakeWay(Protocol):
    """Gives copies back, all of them ``for_good``."""

    def __call__(self, *, for_good: bool) -> None: ...


def _keep(*, for_good: bool) -> None:
    """Give nothing back."""


class ReplicaRoom:
    """The room for copies: as much as this node's own large files take, for each copy that it keeps, and has kept.

    Each node keeps as many copies as others keep of its own, and divided states have parts of about one size.

    Args:
        copies: Number of copies that others keep of this node's files, in the round as it is.
        present: Bytes that copies take now.
        folder: Folder of the copies.
        make_way: Gives copies back that nobody needs, or all of them, ``for_good``; called in a thread.
        is_optional: True if copies are left out where there is no room for them.

    Attributes:
        refusal: Reason why this node keeps no copies; empty while it does.
    """

    def __init__(
        self,
        copies: Callable[[], float],
        present: Callable[[], int],
        folder: CopiesFolder,
        make_way: MakeWay = _keep,
        *,
        is_optional: bool,
    ) -> None:
        self._copies, self._present, self._is_optional = copies, present, is_optional
        self._folder, self._make_way, self._has_disk = folder, make_way, False
        self._sizes, self.refusal = list[int](), ""

    def ask(self, sizes: Mapping[str, int]) -> None:
        """Ask for room for copies of files as large as these, of this node's ranks."""
        self._sizes = [size for name, size in sizes.items() if name.endswith(_DIVIDED)]

    @property
    def needed(self) -> int:
        """Bytes of memory for all copies."""
        return self._bytes if self._folder.is_memory else 0

    @property
    def _bytes(self) -> int:
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
        for is_last in (False, True):  # copies that are left of a round that had some
            if self._folder.is_memory and not self.needed and self._present() and lacking():
                await asyncio.to_thread(partial(self._make_way, for_good=is_last))

    def _give_up(self, lacking: Headroom) -> None:
        needed = self.needed
        self._refuse(f"copies need {binary(needed)} beside two slots: {lacking}. {lacking.remedies(needed)}")

    def ask_disk(self) -> None:
        """See, before the first save, that copies which are kept on a disk have room there.

        Raises ArenaTooSmall if they have not, and are not optional. Later on copies alone depend on that disk.
        """
        if self._folder.is_memory or self._has_disk or not self._bytes:
            return
        try:
            found = headroom(self._folder.path.parent)
        except OSError as error:
            logger.warning("there may be no room for copies of other hosts' files: %s", error)
            return
        found = replace(found, free=found.free + self._present())
        self._has_disk = found.free >= self._bytes
        if not self._has_disk:
            size, remedies = binary(self._bytes), self._folder.remedies(found, self._bytes - found.free)
            if not self._is_optional:
                text = (
                    f"copies of other hosts' files need {size}: {found}. {remedies}; or do without: --fast-replicas 0."
                )
                raise ArenaTooSmall(coded(text, "FC-001"))
            self._refuse(f"copies need {size}: {found}. {remedies}")

    def _refuse(self, why: str) -> None:
        self.refusal = why
        text = coded("no copies of other hosts' files are kept here: %s. To do without: --fast-replicas 0", "FC-045")
        logger.warning(text, self.refusal)
