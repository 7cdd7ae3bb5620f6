"""The wait for the memory of a checkpoint directory while another job on this host owns it."""

import json
import logging
import os
import threading
import time
from pathlib import Path

from fastckpt._core.error_codes import coded
from fastckpt._core.memory.arena import Arena
from fastckpt._core.memory.ownership import Owner
from fastckpt._core.saver.persistence.predecessor import PATIENCE, Job
from fastckpt._core.saver.persistence.tenure import Tenure
from fastckpt._core.storage.store import is_url
from fastckpt.errors import ConfigError, PersistError, PlaceInUse

logger = logging.getLogger("fastckpt")

GIVE_WAY = 20.0
"""Seconds that an agent from which a directory is taken has to stop its workers; then it is killed."""
PAUSE = 0.1
"""Seconds between two looks."""
NOT_TRIED = "the script was not tried: "
"""First words of a refusal of `demand_empty`."""


def demand_empty(location: str, record: Path) -> None:
    """Refuse a directory to a job that `fastckpt plan` tries, unless the directory is empty.

    Call it before anything of the job opens the directory. Its history would end another job there, its save might be
    the newest, and files that seem damaged are quarantined. A directory that is not refused is noted in ``record``,
    with the time of its creation or last change: later files in it are the trial's, and are removed.

    Raises ConfigError, or OSError if it cannot be read.
    """
    if is_url(location):
        raise ConfigError(f"{NOT_TRIED}{location} is a URL, and a trial stores nothing there. Give it a directory")
    with os.scandir(location) as entries:
        found = next((entry.name for entry in entries), "")
    if found:
        raise ConfigError(
            f"{NOT_TRIED}its checkpoint directory {location} is not empty: it has {found}. Give the script an empty "
            "one, or one that does not exist; or plan from the checkpoints that are there: fastckpt plan DIR"
        )
    with record.open("a") as file:
        file.write(json.dumps({"directory": location, "modified": Path(location).stat().st_mtime}) + "\n")


def admit(path: Path, job: Job, tenure: Tenure, ending: threading.Event) -> Arena:
    """The arena of a job's directory, as soon as no other job owns it, whether that one ended or was killed.

    Args:
        path: Path of the arena.
        job: The new owner. If it takes over, the old owner finds itself superseded, and keeps its memory for it.
        tenure: The job's part in the directory.
        ending: Set when the job no longer waits.

    Raises:
        PlaceInUse: The other job goes on.
        PersistError: The job ended, or it was to take over, and the directory does not answer.
        ArenaInUse, ArenaTooSmall: As `Arena.open`.
    """
    try:
        arena = Arena.open(path, job.location, job.launch, _Wait(job, tenure, ending))
    except BaseException:
        # Its thread and its record would otherwise outlive a job that was refused.
        tenure.close()
        raise
    job.ended.update({*arena.ended} - {job.launch})
    return arena


class _Wait:
    """Called again and again while the arena has another owner."""

    def __init__(self, job: Job, tenure: Tenure, ending: threading.Event) -> None:
        self._job = job
        self._tenure = tenure
        self._ending = ending
        self._begun = 0.0
        self._owner: Owner | None = None
        self._victim: Owner | None = None

    def __call__(self, owner: Owner) -> None:
        now = time.monotonic()
        self._begun = self._begun or now
        left = PATIENCE - (now - self._begun)
        if left <= 0:
            raise PlaceInUse(
                coded(
                    f"{self._job.location} is in use by another job, which lives: {owner}. End that job, or give this "
                    "one another place; to take this one away from it, start with --fast-take-over.",
                    "FC-011",
                )
            )
        if owner != self._owner:
            self._meet(owner, left)
        if owner == self._victim and now - self._begun > GIVE_WAY:
            self._end(owner)
        # An Event, not a sleep, so that a signal to the agent ends the wait at once.
        if self._ending.wait(PAUSE):
            raise PersistError(f"the job ended while it waited for {owner}")

    def _meet(self, owner: Owner, left: float) -> None:
        """Log the owner that it waits for; a new owner means that a job which takes over has succeeded."""
        # Of several jobs that take over, the one that has replaced the first owner keeps the directory.
        if self._job.take_over and self._owner is None:
            logger.warning("taking over %s from %s", self._job.location, owner)
            self._victim = owner
            # The newer history makes the owner find itself superseded:
            # it stops its workers and lets go of the arena's lock.
            self._tenure.take_from(owner.launch)
        what = "it has died, but a process that it started keeps the memory of" if owner.is_dead else "it saves to"
        text = coded("waiting, for up to %.0f s, for %s: %s %s", "FC-011")
        logger.warning(text, left, owner, what, self._job.location)
        self._owner = owner

    def _end(self, owner: Owner) -> None:
        """Kill an agent that is stopped, or hangs: its memory outlives it."""
        self._victim = None
        if owner.process is not None and owner.process.kill():
            logger.warning(
                "killed %s: %s was taken from it, and it has not released its memory within %.0f s",
                owner,
                self._job.location,
                GIVE_WAY,
            )
