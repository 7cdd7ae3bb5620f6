"""What the checkpointers of all frameworks share: a writer that saves states and tells what became of them."""

import contextlib
import enum
import logging
import operator
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastckpt.config import Place, Settings
from fastckpt.engine.agreement import Agreement
from fastckpt.engine.beats import Beats
from fastckpt.engine.deletion import CheckpointDeletionStrategy, delete_function, policy_of
from fastckpt.engine.link import Link, Wishes
from fastckpt.engine.service import launch_of, leave_own_saver, saver_address
from fastckpt.engine.snapshot import Snapshotter
from fastckpt.errors import ConfigError, FastckptError, PersistError, StepError
from fastckpt.format.ids import LARGEST, SaveId
from fastckpt.memory.fill import idle_cores
from fastckpt.memory.stacks import offer
from fastckpt.metrics import counts, event, write_events_to
from fastckpt.policy import retention
from fastckpt.policy.verify import level
from fastckpt.storage.store import Store, is_url, normalised, open_store, target_in

logger = logging.getLogger("fastckpt")


class StorageType(enum.Enum):
    """How far a save goes before it counts: into shared memory, or on to storage in the background."""

    MEMORY = 0
    DISK = 1


@dataclass(frozen=True)
class SaveResult:
    """What became of a save.

    Attributes:
        saved: Whether this rank's part of the step is in memory (and, with DISK, on its way to storage).
        step: The step.
        reason: Why it was not saved, or that memory held the step already; else empty.
        skipped: How many saves this checkpointer has skipped so far.
        trouble: Why persists fail at the moment; empty while they do not. Training need not stop for it.
    """

    saved: bool
    step: int
    reason: str = ""
    skipped: int = 0
    trouble: str = ""

    def __bool__(self) -> bool:
        return self.saved


class Writer:
    """Saves the states of one worker to one checkpoint directory; each state is a file of the checkpoint."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        deletion_strategy: CheckpointDeletionStrategy | None = None,
        *,
        weights_only: bool = True,
        verify: str = "resume",
        remote: str | os.PathLike[str] = "",
        remote_deletion_strategy: CheckpointDeletionStrategy | None = None,
    ) -> None:
        self.verify = level(verify)
        self.place, self.settings = Place.from_environment(), Settings.from_environment()
        write_events_to(self.settings.events)
        self.directory = normalised(checkpoint_dir)
        if not is_url(self.directory):
            _make(self.directory, self.place)
        self.threads = self.settings.fill_threads or idle_cores(1)
        self.resumed_from: SaveId | None = None
        self.skipped = 0
        self._strategy = deletion_strategy
        wishes = _wishes(self.directory, deletion_strategy, self.verify, remote, remote_deletion_strategy)
        self.link = Link(wishes, self.place, saver_address(self.place, self.settings))
        self._snapshots = Snapshotter(self.link, self.threads, weights_only=weights_only)
        self._last: SaveId | None = None
        self._held: SaveId | None = None
        self._loads = 0
        self._store: Store | None = None
        self._rollback: dict[str, Any] = {}
        self._attempt = ""
        self._pid = os.getpid()
        self._closed = False
        stacks = offer() if self.place.agent and self.settings.hang_timeout != "off" else 0
        self.beats = Beats(self.link.line, self.place.restart_count, stacks)

    def prepare(self, states: Mapping[str, Any]) -> None:
        """Have memory made ready for states like these; raises ArenaTooSmall."""
        self.check_usable()
        self._snapshots.prepare(states)

    def save(
        self,
        step: int,
        states: Mapping[str, Any],
        storage_type: StorageType,
        path: str,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveResult:
        """Save the states as files of these names.

        Raises:
            StepError: The step is older than one saved since the last resume.
            ConfigError: A metric is no finite number.
            NotLoadable, ArenaTooSmall: The save cannot be made; the checkpoints before it stay.
        """
        self.check_usable()
        save, path = self._id(step), target_in(self.directory, path)
        persist = StorageType(storage_type) is StorageType.DISK
        measures = {"metrics": retention.checked(metrics)} if metrics else {}
        if save == self._held:
            return self._save_again(save, persist, path, measures)
        self._last = save
        with self.beats.save(save.step):
            outcome = self._snapshots.save(save, states, persist=persist, details=self._details(path) | measures)
        if outcome.skipped:
            self.skipped += 1
            counts["skipped_saves"] += 1
        else:
            self._held = save
            event("saved", step=save.step, rank=self.place.rank)
        self._clean_up()
        return SaveResult(not outcome.skipped, save.step, outcome.skipped, self.skipped, outcome.trouble)

    def _save_again(self, save: SaveId, persist: bool, path: str, measures: dict[str, Any]) -> SaveResult:
        """Memory holds this state: it may be that only now it was measured, or is to be persisted."""
        trouble = ""
        with self.beats.stall("save"):
            try:
                if measures:
                    self._snapshots.add_details(measures)
            except OSError as error:
                trouble = f"the metrics of {save} could not be kept: {error}"
            if persist:
                trouble = self._snapshots.notify(save, persist=True, path=path) or trouble
        return SaveResult(True, save.step, "memory held it already", self.skipped, trouble)

    def wait(self, timeout: float) -> int | None:
        """Wait until nothing is on its way to storage; the step of the newest durable checkpoint, None if none is.

        Raises:
            TimeoutError: It takes longer than ``timeout`` seconds.
            PersistError: The newest persist has failed for good.
        """
        self.check_usable()
        end = time.monotonic() + timeout
        with self.beats.stall("wait", timeout):
            while (status := self.link.status()).waiting:
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"{status.waiting} checkpoints are not durable after {timeout:g} s; {status.trouble}"
                    )
                time.sleep(0.01)
        self._clean_up()
        if status.trouble:
            raise PersistError(status.trouble)
        return status.newest[1] if status.newest else None

    def open_history(self, ranks: Agreement, resume_path: str) -> dict[str, Any]:
        """Let later saves belong to a new history, the same on all ranks: the job goes on from another point.

        After a rollback to ``resume_path`` each save carries that fact. Returns how to know such saves by their
        details, for restarted workers that ask for the same rollback again; empty if it is asked for anew.

        Raises ConfigError, in all ranks, if they do not ask for the same.
        """
        if self._last is not None:
            self.link.next_history()
            self._last = self._held = None
        asked = {"resume_path": resume_path, "verify": self.verify, "remote": self.link.wishes.remote}
        said = ranks.gather([self.link.history, launch_of(self.place), asked])
        histories, (launch, *_), wishes = zip(*said, strict=True)
        _check_alike(wishes)
        self.link.history, self._attempt = max(histories), launch
        self._rollback = {"rollback": [launch, normalised(resume_path)]} if resume_path else {}
        self._loads += 1
        return self._rollback if self._loads == 1 else {}

    def close(self) -> None:
        """Take leave; without fastckpt-run, the last writer waits for the last flush. Does nothing the second time."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.beats.close()
        self._snapshots.close()
        if self._store is not None:
            self._store.close()
        self.link.close()
        if not self.place.agent:
            leave_own_saver()

    def _id(self, step: int) -> SaveId:
        step = operator.index(step)
        if not 0 <= step <= LARGEST:
            raise StepError(f"step {step} is out of range; steps are whole numbers from 0 to {LARGEST}")
        if self._last is not None and step < self._last.step:
            raise StepError(
                f"step {step} comes after step {self._last.step} was saved; steps must not go back. To train on from "
                f"an older checkpoint, load it with load_checkpoint(resume_path=...): that opens a new history."
            )
        return SaveId(self.link.history, step)

    def _details(self, path: str) -> dict[str, Any]:
        nodes = self.place.group_world_size
        return {
            "world_size": self.place.world_size,
            "num_threads": torch.get_num_threads(),
            "path": path,
            "parent": list(self.resumed_from) if self.resumed_from else None,
            **self._rollback,
            **({"node": self.place.group_rank, "nodes": nodes, "attempt": self._attempt} if nodes > 1 else {}),
        }

    def _clean_up(self) -> None:
        """Let a user's own deletion strategy see what became durable; it runs here, never in the agent.

        Trouble with storage is logged. Whatever else the strategy raises is a mistake in it that its user should see:
        it comes out of a save that is complete, and the next one goes on with the next checkpoint.
        """
        strategy, news = self._strategy, self.link.news
        if strategy is None or self.place.rank != 0 or policy_of(strategy) is not None:
            news.clear()
            return
        if not news:
            return
        if self._store is None:
            self._store = open_store(self.directory)
        delete = delete_function(self._store)
        while news:
            save = news.popleft()
            try:
                strategy.clean_up(save.step, delete)
            except (FastckptError, OSError) as error:
                counts["deletion_failures"] += 1
                logger.warning("the deletion strategy could not delete: %s", error)
            except Exception as error:
                error.add_note(
                    f"Raised by the deletion strategy for step {save.step}, when all was saved; saves go on."
                )
                raise

    def check_usable(self) -> None:
        """Raise FastckptError after `close`, and in a forked process."""
        if os.getpid() != self._pid:
            raise FastckptError("a checkpointer belongs to the process that made it, not to one forked from it")
        if self._closed:
            raise FastckptError("the checkpointer is closed")


def _make(directory: str, place: Place) -> None:
    """Make a checkpoint directory. That storage fails is no reason for restarted workers not to go on from memory."""
    with contextlib.suppress(OSError) if place.restart_count else contextlib.nullcontext():
        Path(directory).mkdir(parents=True, exist_ok=True)


def _check_alike(wishes: Sequence[Mapping[str, str]]) -> None:
    """Raise ConfigError unless all ranks ask for the same."""
    for name in wishes[0]:
        given = [wish[name] for wish in wishes]
        if len(set(given)) > 1:
            raise ConfigError(f"{name} must be the same on all ranks; rank by rank it is {given[:8]}")


def _wishes(
    directory: str,
    strategy: CheckpointDeletionStrategy | None,
    verify: str,
    remote: str | os.PathLike[str],
    remote_strategy: CheckpointDeletionStrategy | None,
) -> Wishes:
    """What to ask of the saver; raises ConfigError for a second level that cannot be."""
    policy, remote_policy = (retention.to_json(p) if p else {} for p in map(policy_of, (strategy, remote_strategy)))
    location = normalised(remote) if os.fspath(remote) else ""
    if location and (is_url(directory) or location == directory):
        raise ConfigError(
            f"remote is {remote} and the checkpoint directory {directory}: a copy is made of what lies in a directory "
            "on a disk, elsewhere. Give such a directory, or no remote."
        )
    if remote_strategy is not None and not (location and remote_policy):
        raise ConfigError(
            f"{type(remote_strategy).__name__} cannot delete what is in remote={remote!r}: give a remote store, and a "
            "strategy that fastckpt has: those of users do not run where uploads are made"
        )
    return Wishes(directory, policy, verify, location, remote_policy)
