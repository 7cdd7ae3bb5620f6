"""Resumes of several checkpointers of one job, such as an actor's and a critic's, from the same step.

Each save names the directories of checkpointers in step with it, and the history that they wrote. A load passes
over steps that these do not have: a kill between the saves of two must not resume them from different steps.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import arena_path, slots_of
from fastckpt._core.policy.resume import DURABLE, CheckpointLocation
from fastckpt._core.resume.tiers import Candidate, Candidates
from fastckpt._core.storage.store import is_url, open_store
from fastckpt.errors import FastckptError

logger = logging.getLogger("fastckpt")

BESIDE = "beside"
"""The detail of a checkpoint that has the directories saved in step with it, and the history of each."""


Wanted = Callable[[CheckpointLocation, Candidate], bool]
"""Returns whether a checkpoint may be the one to resume."""


class Pairing:
    """Checkpoints that other checkpointers of a job can go on from.

    Args:
        loaded: The checkpoints that those of this process have loaded just now, by directory; None for nothing.
        shm_dir: The directory with the arenas of others.
        agent_slot: Number of the saver's agent among those that share this host.

    Attributes:
        refused: The checkpoints that were passed over, and the directories that lack each.
    """

    def __init__(self, loaded: Mapping[str, SaveId | None], shm_dir: str, agent_slot: int) -> None:
        self.refused: dict[SaveId, list[str]] = {}
        self._loaded, self._shm_dir, self._agent_slot = loaded, shm_dir, agent_slot
        self._known: dict[str, frozenset[SaveId]] = {}

    def companions(self, candidates: Candidates) -> set[str]:
        """The directories that decide which of these are accepted, and that this process has not loaded from."""
        return {name for each in candidates.values() for name in beside(each.details)} - self._loaded.keys()

    def know(self, durable: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Take the findings of the first rank; memory of this node is added."""
        self._known = {name: self._held(name, found) for name, found in durable.items()}

    def accepted(self, candidates: Candidates) -> list[CheckpointLocation]:
        """The checkpoints of which all that were saved in step with them have that step, too."""
        found = []
        for at, candidate in candidates.items():
            others = beside(candidate.details).items()
            if lacking := [name for name, history in others if not self._has(name, SaveId(history, at.step))]:
                self.refused[SaveId(at.history, at.step)] = lacking
            else:
                found.append(at)
        return found

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
        held = self._known.get(directory, frozenset())
        return save in held or not held  # a directory without any may have been removed: that forbids nothing

    def _held(self, directory: str, durable: Sequence[Sequence[int]]) -> frozenset[SaveId]:
        """Checkpoints of another directory, and in its memory on this node; none if that cannot be read."""
        try:
            arena = arena_path(self._shm_dir, directory, self._agent_slot)
            here = {id for slot in slots_of(arena) if (id := slots.read(slot).committed)}
        except (FastckptError, OSError) as error:
            logger.warning("the memory of %s cannot be read: %s", directory, error)
            return frozenset()
        return frozenset(here | {SaveId(*each) for each in durable})


@dataclass(frozen=True)
class Selection:
    """Selects the checkpoints of which one may be resumed: those wanted that other checkpointers, if any, have, too."""

    wanted: Wanted
    pairing: Pairing | None = None

    def __call__(self, candidates: Candidates) -> list[CheckpointLocation]:
        """Return the wanted ones of the candidates."""
        wanted = self._wanted(candidates)
        return [*wanted] if self.pairing is None else self.pairing.accepted(wanted)

    def newer(self, candidates: Candidates, save: SaveId) -> list[SaveId]:
        """The durable ones that are wanted and newer than this one, whether other checkpointers have them or not."""
        return sorted({SaveId(*at.id) for at in self._wanted(candidates) if at.tier in DURABLE and at.id > save})

    def companions(self, candidates: Candidates) -> set[str]:
        """The directories that decide about these, and that have to be searched."""
        return set() if self.pairing is None else self.pairing.companions(self._wanted(candidates))

    def know(self, durable: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Take the findings of the first rank in these directories."""
        if self.pairing is not None:
            self.pairing.know(durable)

    def _wanted(self, candidates: Candidates) -> Candidates:
        return {at: each for at, each in candidates.items() if self.wanted(at, each)}


def search_companions(directories: Iterable[str]) -> dict[str, list[list[int]]]:
    """The durable checkpoints of other directories that can be listed; the first rank calls it, for all ranks."""
    return {name: found for name in sorted(directories) if (found := _durable(name)) is not None}


def _durable(directory: str) -> list[list[int]] | None:
    """The checkpoints of a directory; None if it is not there, or does not answer."""
    if not (is_url(directory) or Path(directory).is_dir()):
        return None
    try:
        with closing(open_store(directory)) as store:
            return [list(stored.id) for stored in store.checkpoints()]
    except (FastckptError, OSError) as error:
        logger.warning("the checkpoints of %s cannot be listed: %s", directory, error)
        return None


def beside(details: Mapping[str, Any]) -> dict[str, int]:
    """The directories that were saved in step with a checkpoint, and their histories."""
    found = details.get(BESIDE)
    return {name: h for name, h in found.items() if type(h) is int} if isinstance(found, dict) else {}
