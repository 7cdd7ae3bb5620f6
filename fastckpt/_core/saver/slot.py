"""A slot as its owner sees it: the records in it, and its present readers."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from fastckpt._core import metrics
from fastckpt._core.format.completeness import lacks, missing_files
from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.policy.slots import SlotView
from fastckpt._core.saver.persistence.pending_persist import Urgency

logger = logging.getLogger("fastckpt")


READER = "reader "
"""First word of the names of processes that read slots."""


@dataclass(eq=False)
class Slot:
    """State of one slot as the saver knows it; `read` takes it from the directory, which counts if they differ.

    Attributes:
        size: Bytes of the checkpoint, once it is whole.
        target: Path that its writers want for its model's file, once it is whole; empty for the default.
        wanted: Paths of its model's file on storage, once it is whole, and how to write them; as in Persister.submit.
        pins: Users that need it to stay as it is, and why.
        verified: True if its images were read since its writers died, and match their digests.
        lost: Save in it that was found bad, and why; until the next save.
    """

    path: Path
    id: SaveId | None = None
    writers: frozenset[int] = frozenset()
    done: set[int] = field(default_factory=set)
    committed: bool = False
    size: int = 0
    target: str = ""
    wanted: dict[str, Urgency] = field(default_factory=dict)
    pins: dict[str, str] = field(default_factory=dict)
    verified: bool = False
    lost: str = ""
    _parts: dict[int, slots.SlotDone] = field(default_factory=dict)
    _recovered: float = 0.0

    @property
    def whole(self) -> SaveId | None:
        """The checkpoint that is whole here; None for none. May be read in any thread."""
        id = self.id
        return id if self.committed and self.id == id else None

    def read(self, known: Mapping[int, slots.SlotDone] = MappingProxyType({})) -> None:
        """Take the state from the records; the ``known`` ones have just been read."""
        records = slots.read(self.path, known)
        self.committed = records.committed is not None
        self.size = sum(records.files.values()) if self.committed else 0
        self.target = records.details.get("path", "") if self.committed else ""
        self.id = records.begin.id if records.begin else None
        self.writers = records.begin.writers if records.begin else frozenset()
        self.done = {writer for writer, done in records.done.items() if done.id == self.id}

    def read_part(self, writer: int) -> None:
        """Take one writer's part of the state from its record; with the last one, see that all are there.

        Each writer reports its record: to read all of them each time would cost the square of the writers.
        """
        part = slots.read_done(self.path, writer)
        is_done = part is not None and part.id == self.id
        if is_done is (writer in self.done):
            return
        # A record appears with a commit, and disappears if somebody
        # removed it: either way the set follows the directory.
        self.done ^= {writer}
        if is_done and part is not None:
            self._parts[writer] = part
        if self.committed or self.writers <= self.done:
            # With the last part: the records of others were parsed when they reported, and are not read again.
            self.read(self._parts)
            self._parts.clear()

    def has(self, save: SaveId, writer: int) -> bool:
        """Return whether it has a writer's part of a save."""
        return self.id == save and writer in self.done

    def recover(self) -> None:
        """Take the state that dead writers left: a whole checkpoint, or nothing."""
        self.read()
        # Pins of dead readers; the coordinator restores pins of persists, which the agent itself holds.
        self.pins.clear()
        self.wanted.clear()
        self.verified, self._recovered = False, time.perf_counter()
        damage = self._damage() if self.committed else ""
        if damage:
            self.lose(damage)
        if damage or not self.committed:
            self.drop()

    def _damage(self) -> str:
        """Return why the committed save cannot be resumed, by its sizes and names; empty if it can."""
        records = slots.read(self.path)
        details, world_size = records.details, records.details.get("world_size", 1)
        # Earlier versions left out ranks that had gone; of several nodes, others have the rest.
        is_unsure = "rank" not in details and details.get("nodes", 1) == 1
        missing = missing_files(records.files, world_size, details) if is_unsure else []
        return lacks(missing, world_size) if missing else slots.damage(self.path, records.files)

    def attest(self, save: SaveId, digests: dict[str, str], since: float, *, of_first: bool = True) -> None:
        """Write digests of images into the slot, if they are those of the save that is whole here.

        They were read from the instant ``since`` on (time.perf_counter). If not ``of_first``, they are those of a
        checkpoint in which the first node's stand for files that each node has of its own.
        """
        try:
            records = slots.read(self.path)
            if self.id == save == records.committed:
                # Of several nodes, files that each node has for itself have
                # digests of their own; the manifest names the first node's.
                own = records.files.keys() - (() if of_first else records.common)
                ours = {name: digest for name, digest in digests.items() if name in own}
                slots.write_digests(self.path, save, records.digests | ours)
                # A digest that began before the writers died does not cover bytes that they may have written later.
                self.verified = ours.keys() == records.files.keys() and since >= self._recovered
        # Without digests a resume compares sizes only; the checkpoint itself is whole.
        except OSError as error:
            logger.warning("%s in memory has no digests: %s", save, error)

    def begin(self, save: SaveId, writers: frozenset[int]) -> set[str]:
        """Start a new save in this slot; returns images that nobody needs any more."""
        left = slots.begin(self.path, slots.SlotBegin(save, writers))
        self.committed = False  # first, for threads that read `whole` meanwhile
        self.id, self.writers, self.done = save, writers, set()
        self.verified, self.lost = False, ""
        self.wanted.clear()
        self._parts.clear()
        return left

    def give_up(self, why: str) -> None:
        """Its images differ from the save: nobody may have them."""
        assert self.id is not None
        metrics.counts["bad_checkpoints"] += 1
        metrics.event("bad_checkpoint", **self.id._asdict(), tier="memory", reason=why)
        self.lose(why)
        self.clear()

    def lose(self, why: str) -> None:
        """Remember that its save is bad: a bad save must not end in a silent fresh start."""
        self.lost = f"{self.id} in memory is bad, and given up: {why}"
        logger.warning("%s", self.lost)

    def clear(self) -> None:
        """Hold nothing."""
        slots.clear(self.path)
        self.forget()

    def drop(self) -> None:
        """Hold nothing, also if its records cannot be invalidated: the next save here tries that again."""
        try:
            self.clear()
        except OSError as error:
            logger.error("what is left of %s in %s cannot be removed: %s", self.id, self.path, error)
            self.forget()

    def forget(self) -> None:
        """Count as empty, with any files there."""
        self.id, self.writers, self.done, self.committed = None, frozenset(), set(), False
        self.wanted.clear()

    def want(self, path: str, urgency: Urgency) -> None:
        """Have it persisted once it is whole; of its writers' requests, the most urgent counts."""
        self.wanted[path] = max(urgency, self.wanted.get(path, urgency))

    def take_wanted(self) -> dict[str, Urgency]:
        """Return, once, the paths on storage for its model, and how to write them; empty as long as it is not whole."""
        wanted, self.wanted = (self.wanted, {}) if self.committed else ({}, self.wanted)
        return wanted

    def view(self, *, pinned_by_readers: bool = True) -> SlotView:
        """Return the properties by which a slot is chosen.

        Processes that look for a checkpoint to load may count, or not.
        """
        pins = (why for who, why in self.pins.items() if pinned_by_readers or not who.startswith(READER))
        pinned = next(pins, "")
        return SlotView(self.id, self.committed, pinned, self.writers, frozenset(self.done))
