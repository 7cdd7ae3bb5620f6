"""What becomes of checkpoints that a resume found bad: on storage they are set aside, in memory given up."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastckpt._core.client.connection import SaverClient
from fastckpt._core.policy.resume import CheckpointLocation
from fastckpt._core.resume.candidates import Candidate
from fastckpt._core.storage.store import Store
from fastckpt.errors import BadCheckpoint, FastckptError, PersistError

logger = logging.getLogger("fastckpt")

Faults = dict[str, str]
"""Names of files, and what is wrong with them."""


class BadCheckpoints:
    """What the ranks of a resume have found bad.

    Only what was seen in the bytes of files has consequences. That a file does not load may be the fault of the
    script, or of a library that changed: it is passed over, and left as it is.
    """

    def __init__(self, link: SaverClient, threads: int) -> None:
        self._link = link
        self._threads = threads
        self._memory: list[CheckpointLocation] = []
        self._storage: list[tuple[Candidate, Faults]] = []

    def add(self, candidate: CheckpointLocation, offer: Candidate | None, found: Faults) -> None:
        """Some rank has found these files of a checkpoint bad; none, if they only did not load.

        The offer is this rank's, if it has one.
        """
        if offer is None or not found:
            return
        if candidate.tier == "memory":
            self._memory.append(candidate)
        elif offer.durable:
            self._storage.append((offer, found))

    def carry_out(self, damaged: list[tuple[Store, Path | str, str]]) -> None:
        """Set aside what is bad on storage, in the first rank of the job; tell the savers what is bad.

        Args:
            damaged: What this rank saw to be damaged when it looked for checkpoints.
        """
        place = self._link.place
        if place.rank == 0:
            for offer, found in self._storage:
                self._set_aside_if_confirmed(offer, found)
            for storage, path, why in damaged:
                _set_aside(storage, path, why)
        on_storage = bool(self._storage or damaged)
        if place.local_rank == 0 and (self._memory or on_storage):
            try:
                self._link.tell_bad([list(candidate.id) for candidate in self._memory], storage=on_storage)
            except FastckptError as error:
                logger.warning("the saver could not be told what is bad: %s", error)

    def _set_aside_if_confirmed(self, offer: Candidate, found: Faults) -> None:
        """What another rank alone cannot read stays: its mount may be wrong. So does what cannot be reached now."""
        checked = check(offer, list(found), self._threads)
        confirmed = {name: why for name, why in checked.items() if not why.startswith(PersistError.__name__)}
        for name in found.keys() - confirmed.keys():
            logger.warning("%s is left where it is: rank 0 finds nothing wrong with it", offer.files[name])
        if confirmed and offer.durable:
            _set_aside(*offer.durable, "; ".join(confirmed.values()))


def check(offer: Candidate, names: list[str], threads: int) -> Faults:
    """Check files of an offer, several at once; those that are bad, and why."""
    with ThreadPoolExecutor(max(1, min(threads, len(names))), "fastckpt-verify") as pool:
        found = zip(names, pool.map(lambda name: _fault(offer, name), names), strict=True)
        return {name: why for name, why in found if why}


def _fault(offer: Candidate, name: str) -> str:
    try:
        offer.check(name)
    except (BadCheckpoint, PersistError, OSError) as error:
        return f"{type(error).__name__}: {error}"[:500]
    return ""


def _set_aside(storage: Store, bad: Any, why: str) -> None:
    try:
        logger.warning("set aside as %s: %s", storage.quarantine(bad, why), why)
    except PersistError as error:  # say, read-only storage: it is found bad again at the next resume
        logger.warning("%s; it stays where it is: %s", why, error)
