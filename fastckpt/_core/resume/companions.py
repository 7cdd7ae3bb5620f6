"""Resumes of several checkpointers of one job, such as an actor's and a critic's, from the same step.

Each save names the directories whose checkpointers were in step with it, and which history they wrote. A load passes
over what these do not have: a kill between the saves of two must not bring them back from unlike steps.
"""

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import arena_path, slots_of
from fastckpt._core.policy.resume import CheckpointLocation
from fastckpt._core.resume.tiers import Candidate
from fastckpt._core.storage.store import is_url, open_store
from fastckpt.errors import FastckptError

logger = logging.getLogger("fastckpt")

BESIDE = "beside"
"""The detail of a checkpoint that has the directories saved in step with it, and the history of each."""

PAIRED = "paired"
"""The step before one that was loaded, for a checkpointer that another was in step with."""


class Pairing:
    """Checkpoints that other checkpointers of a job can go on from.

    Args:
        loaded: The checkpoints that those of this process have loaded just now, by directory; None for nothing.
        shm_dir: The directory with the arenas of others.
        group_rank: The rank of this node.

    Attributes:
        refused: The checkpoints that were passed over, and the directories that lack each.
    """

    def __init__(self, loaded: Mapping[str, SaveId | None], shm_dir: str, group_rank: int) -> None:
        self.refused: dict[SaveId, list[str]] = {}
        self._loaded, self._shm_dir, self._group_rank = loaded, shm_dir, group_rank
        self._known: dict[str, frozenset[SaveId]] = {}

    def accepts(self, location: CheckpointLocation, candidate: Candidate) -> bool:
        """Return whether all that were saved in step with a checkpoint have that step, too."""
        step = location.step
        lacking = [each for each, h in beside(candidate.details).items() if not self._has(each, SaveId(h, step))]
        if lacking:
            self.refused[SaveId(*location.id)] = lacking
        return not lacking

    def report(self, chosen: SaveId, directory: str) -> None:
        """Log checkpoints newer than the resumed one that were passed over for the sake of others."""
        for save in sorted(save for save in self.refused if save > chosen):
            logger.warning(
                "%s of %s is passed over for step %d: %s, which was saved in step with it, does not have that step",
                save,
                directory,
                chosen.step,
                ", ".join(self.refused[save]),
            )

    def _has(self, directory: str, save: SaveId) -> bool:
        if directory in self._loaded:
            return self._loaded[directory] == save
        if directory not in self._known:
            self._known[directory] = self._held(directory)
        held = self._known[directory]
        return save in held or not held  # a directory without any may have been removed: that forbids nothing

    def _held(self, directory: str) -> frozenset[SaveId]:
        """Checkpoints of another directory, and in its memory on this node; none if it does not answer."""
        if not (is_url(directory) or Path(directory).is_dir()):
            return frozenset()
        try:
            with closing(open_store(directory)) as store:
                found = {stored.id for stored in store.checkpoints()}
            arena = arena_path(self._shm_dir, directory, self._group_rank)
            found |= {id for slot in slots_of(arena) if (id := slots.read(slot).committed)}
        except (FastckptError, OSError) as error:
            logger.warning("what %s has cannot be looked up: %s", directory, error)
            return frozenset()
        return frozenset(found)


def beside(details: Mapping[str, Any]) -> dict[str, int]:
    """The directories that were saved in step with a checkpoint, and their histories."""
    found = details.get(BESIDE)
    return {name: h for name, h in found.items() if type(h) is int} if isinstance(found, dict) else {}


class Member:
    """One checkpointer of this process, as the others see it.

    Args:
        directory: Its checkpoint directory.
        rank: Its rank; checkpointers of other ranks are no companions.
        history: Gives the history that it writes.

    Attributes:
        recent: The last two steps that it saved, or loaded; None for nothing.
        loaded: The checkpoint that it has loaded; None for nothing, or if it has saved since.
        has_loaded: Whether it has loaded, and not saved since.
    """

    _all: ClassVar["WeakSet[Member]"] = WeakSet()

    def __init__(self, directory: str, rank: int, history: Callable[[], int]) -> None:
        self.directory, self.rank, self._history = directory, rank, history
        self.recent: tuple[object, object] = (object(), None)  # nobody is in step with one that has not loaded
        self.loaded: SaveId | None = None
        self.has_loaded = False
        self._beside: dict[str, int] = {}
        self._pid = os.getpid()
        self._all.add(self)

    def save(self, save: SaveId) -> dict[str, int]:
        """Note a save; returns its detail with the directories that are in step with it.

        These have saved the same two steps last, before this save or with it. One match alone may be chance: of
        two that save every 500 and every 1,000 steps, the first must not go back to the steps of the second.
        """
        before, self.recent = self.recent, (self.recent[1], save.step)
        self.loaded, self.has_loaded = None, False
        return {each.directory: each._history() for each in self._others if each.recent in (before, self.recent)}

    def load(self, save: SaveId | None, details: Mapping[str, Any]) -> None:
        """Note a load; logs an ERROR for each other that was saved in step with it and has loaded another step."""
        self.loaded, self.has_loaded, self._beside = save, True, beside(details)
        self.recent = (PAIRED if save and self._beside else object() if save else None, save.step if save else None)
        for other in self._others if self.rank == 0 else ():
            together = other.directory in self._beside or self.directory in other._beside
            if together and other.has_loaded and other.recent[1] != self.recent[1]:
                logger.error(
                    "%s goes on from %s, but %s, which was saved in step with it, from %s: no step is left that both "
                    "can load. Use one checkpointer for both; for now, give both resume_path of one step, if there is "
                    "one.",
                    self.directory,
                    _at(save),
                    other.directory,
                    _at(other.loaded),
                )

    def pairing(self, shm_dir: str, group_rank: int) -> Pairing:
        """The constraints of its next load."""
        return Pairing({each.directory: each.loaded for each in self._others if each.has_loaded}, shm_dir, group_rank)

    def leave(self) -> None:
        """Stop being a companion of the others."""
        self._all.discard(self)

    @property
    def _others(self) -> list["Member"]:
        mine = self._pid, self.rank
        return [each for each in self._all if (each._pid, each.rank) == mine and each.directory != self.directory]


def _at(save: SaveId | None) -> str:
    return f"step {save.step}" if save else "nothing"
