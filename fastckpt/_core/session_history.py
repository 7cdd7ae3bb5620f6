"""The history of a session's saves, the same on all ranks; its parent checkpoints, and the histories beside it."""

import logging
import os
import secrets
from collections.abc import Mapping
from typing import Any, ClassVar
from weakref import WeakSet

from fastckpt._core.client.collective import Agreement, check_alike
from fastckpt._core.client.connection import SaverClient
from fastckpt._core.config import RankInfo, Settings
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import MEMBERS, ROUND
from fastckpt._core.in_process_saver import launch_of
from fastckpt._core.policy.lineage import HISTORIES, MOST, PASSED_OVER, Ranges, merged, passed_over, past
from fastckpt._core.resume.companions import BESIDE, Pairing, beside
from fastckpt._core.resume.directory_checks import check_one, check_shared, mark_seen, place_of
from fastckpt._core.resume.resume import ResumeResult
from fastckpt._core.storage.store import normalised

logger = logging.getLogger("fastckpt")

PAIRED = "paired"
"""The step before one that was loaded, for a checkpointer that another was in step with."""


class SessionHistory:
    """Opens histories, and remembers which checkpoints the present one goes on from.

    It knows the histories of the other checkpointers of this process and rank, and which are in step with it.

    Attributes:
        directory: The checkpoint directory.
        loads: The number of histories opened: one for each load.
        attempt: The token of all ranks since the last load, never the same twice; empty before that.
        resumed_from: The checkpoint that was loaded last; None for none.
        recent: The last two steps that were saved, or loaded; None for nothing.
        loaded: The checkpoint that was loaded; None for nothing, or if there was a save since.
        has_loaded: True if there was a load, and no save since.
    """

    _all: ClassVar["WeakSet[SessionHistory]"] = WeakSet()

    def __init__(self, link: SaverClient, place: RankInfo, settings: Settings) -> None:
        self._link, self._place, self._arenas = link, place, settings.arenas
        self._allow_lost = str(settings.allow_lost_rank_state)
        self.directory = link.options.directory
        self._launch = launch_of(place)
        self._past: Ranges = ()
        self._passed_over = frozenset[tuple[int, int]]()
        self._rollback: dict[str, Any] = {}
        self.attempt = ""
        self._launches: list[str] = []
        self._in_step: dict[str, int] = {}
        self.loads = 0
        self.resumed_from: SaveId | None = None
        self.recent: tuple[object, object] = (object(), None)  # nobody is in step with one that has not loaded
        self.loaded: SaveId | None = None
        self.has_loaded = False
        self._beside: dict[str, int] = {}
        self._pid = os.getpid()
        self._all.add(self)

    def open(self, ranks: Agreement, resume_path: str, verify: str) -> dict[str, Any]:
        """Open a history, the same on all ranks, for a job that goes on from another checkpoint.

        After a rollback to ``resume_path`` each save carries that fact. Returns the details by which restarted workers
        that ask for the same rollback recognize such saves; empty if the rollback is a new one.

        Raises ConfigError, in all ranks, if they do not ask for the same, or do not share one directory.
        """
        # One gather for all: each costs a round trip to the store, and a resume waits for it. Rank 0's token names the
        # line of saves until the next load: equal steps with different tokens are not the same save.
        asked = {"resume_path": resume_path, "verify": verify, "remote": self._link.options.remote}
        asked["allow_lost_rank_state"] = self._allow_lost
        several = self._place.group_world_size > 1
        seen = mark_seen(self.directory, self._place) if several else None
        where = place_of(self.directory, self._place)
        gathered = ranks.gather([self._link.history, self._launch, secrets.token_hex(8), asked, seen, where])
        histories, launches, (self.attempt, *_), options, marks, places = zip(*gathered, strict=True)
        launch, self._launches = launches[0], sorted(set(launches))
        check_alike(options)
        check_one(places)
        if several:
            check_shared(ranks, self.directory, self._place, marks)
        self._link.history = max(histories)
        self._rollback = {"rollback": [launch, normalised(resume_path)]} if resume_path else {}
        self.loads += 1
        return self._rollback if self.loads == 1 else {}

    @property
    def is_new(self) -> bool:
        """Return whether this history goes on from no save of an earlier one."""
        return not (self.resumed_from or self._rollback)

    def go_on_from(self, resumed: ResumeResult) -> None:
        """Make the loaded checkpoint, if any, the parent of later saves."""
        self._note_load(resumed.id, resumed.details)
        if resumed.state is None:
            return
        self.resumed_from = resumed.id
        self._past, self._passed_over = (), frozenset()
        if resumed.id is not None and not resumed.elsewhere:
            self._past = past(resumed.details, None)
            self._passed_over = passed_over(resumed.details).union(resumed.passed_over)
            self.go_on(resumed.id.history)

    def go_on(self, history: int) -> None:
        """Record this history as one that later saves go on from."""
        self._past = merged(self._past, [(history, history)])

    def details(self, save: SaveId | None = None) -> dict[str, Any]:
        """Details of this history that each of its checkpoints carries; ``save`` is the one being made, if any."""
        nodes = self._place.group_world_size
        self._in_step = self._note_save(save) if save else self._in_step
        return {
            "parent": list(self.resumed_from) if self.resumed_from else None,
            HISTORIES: [list(run) for run in self._past],
            ROUND: self.attempt or f"{self._launch} {self._link.history}",
            **({PASSED_OVER: sorted(self._passed_over)[-MOST:]} if self._passed_over else {}),
            **self._rollback,
            **({BESIDE: self._in_step} if self._in_step else {}),
            **({"attempt": self.attempt} if self.attempt or nodes > 1 else {}),
            **({"node": self._place.group_rank, "nodes": nodes} if nodes > 1 else {}),
            **({MEMBERS: self._launches} if nodes > 1 else {}),
        }

    @property
    def pairing(self) -> Pairing:
        """The constraints of the next load, for the sake of other checkpointers of this job."""
        loaded = {each.directory: each.loaded for each in self._others if each.has_loaded}
        return Pairing(loaded, self._arenas, self._link.agent_slot)

    def leave(self) -> None:
        """Let other checkpointers of the job go on without this one."""
        self._all.discard(self)

    def _note_save(self, save: SaveId) -> dict[str, int]:
        """Note a save; returns its detail with the directories that are in step with it.

        These have saved the same two steps last, before this save or with it. One match alone may be chance: of
        two that save every 500 and every 1,000 steps, the first must not go back to the steps of the second.
        """
        before, self.recent = self.recent, (self.recent[1], save.step)
        self.loaded, self.has_loaded = None, False
        return {each.directory: each._link.history for each in self._others if each.recent in (before, self.recent)}

    def _note_load(self, save: SaveId | None, details: Mapping[str, Any]) -> None:
        """Note a load; logs an ERROR for each other that was saved in step with it and has loaded another step."""
        self.loaded, self.has_loaded, self._beside = save, True, beside(details)
        self.recent = (PAIRED if save and self._beside else object() if save else None, save.step if save else None)
        for other in self._others if self._place.rank == 0 else ():
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

    @property
    def _others(self) -> list["SessionHistory"]:
        mine = self._pid, self._place.rank
        there = [each for each in self._all if (each._pid, each._place.rank) == mine]
        return [each for each in there if each.directory != self.directory]


def _at(save: SaveId | None) -> str:
    return f"step {save.step}" if save else "nothing"
