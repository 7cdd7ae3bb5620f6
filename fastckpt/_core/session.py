"""What the checkpointers of all frameworks share: a writer that saves states and tells what became of them."""

import logging
import os
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch
from torch.optim import Optimizer

from fastckpt._core import arguments
from fastckpt._core.arguments import public
from fastckpt._core.client.collective import Agreement, check_alike
from fastckpt._core.client.connection import SaverClient
from fastckpt._core.client.deletion_runner import DeletionRunner
from fastckpt._core.client.departures import Departures
from fastckpt._core.client.flash_options import FlashOptions
from fastckpt._core.client.heartbeat import Heartbeat
from fastckpt._core.client.save_results import SaveRequest, SaveResult, StorageType, at_least
from fastckpt._core.client.saver_options import wishes
from fastckpt._core.client.stale_addresses import explain_stale_addresses
from fastckpt._core.config import RankInfo, Settings
from fastckpt._core.format.ids import LARGEST, SaveId
from fastckpt._core.format.manifest import MEMBERS, ROUND
from fastckpt._core.in_process_saver import launch_of, leave_own_saver, saver_address
from fastckpt._core.ipc.messages import Goodbye, Status
from fastckpt._core.memory.stacks import offer
from fastckpt._core.metrics import counts, write_events_to
from fastckpt._core.policy import retention
from fastckpt._core.policy.lineage import HISTORIES, Ranges, merged, past
from fastckpt._core.policy.verify import level
from fastckpt._core.preflight import make_ready
from fastckpt._core.resume.companions import BESIDE, Member, Pairing
from fastckpt._core.resume.missing_load import warn_of_unloaded
from fastckpt._core.resume.resume import ResumeResult
from fastckpt._core.resume.shared_directory import check_shared, mark_seen
from fastckpt._core.retention import CheckpointDeletionStrategy, warn_of_another_directory
from fastckpt._core.schedule.persist_turns import PersistTurns
from fastckpt._core.snapshot.overlap import Overlap, optimizers_in
from fastckpt._core.snapshot.snapshotter import Snapshotter
from fastckpt._core.storage.io.modes import choose
from fastckpt._core.storage.store import is_url, normalised, target_in
from fastckpt._core.transfer.device_streams import DeviceStreams
from fastckpt._core.transfer.host_copy import idle_cores
from fastckpt.errors import FastckptError, PersistError, StepError

__all__ = ["SaveResult", "Session", "SessionOptions", "StorageType", "WithWriter"]

logger = logging.getLogger("fastckpt")

explain_stale_addresses()  # here: the process group is formed before a checkpointer is made


@dataclass(frozen=True)
class SessionOptions:
    """What all checkpointers take by name; `DdpCheckpointer` says what each means."""

    weights_only: bool = True
    verify: str = "resume"
    overlap: Optimizer | Iterable[Optimizer] | None = None
    remote: str | os.PathLike[str] = ""
    remote_deletion_strategy: CheckpointDeletionStrategy | None = None
    flash: FlashOptions = field(default_factory=FlashOptions)


DEFAULTS = SessionOptions()


class Session:
    """Saves the states of one worker to one checkpoint directory; each state is a file of the checkpoint."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        deletion_strategy: CheckpointDeletionStrategy | None = None,
        options: SessionOptions = DEFAULTS,
    ) -> None:
        optimizers = optimizers_in(options.overlap)
        self.verify = level(options.verify)
        self.place, self.settings = RankInfo.from_environment(), Settings.from_environment()
        write_events_to(self.settings.events)
        choose(self.settings.mode)
        self.directory = normalised(arguments.directory(checkpoint_dir))
        if not is_url(self.directory):
            make_ready(self.directory, self.place)
        self.threads = self.settings.fill_threads or idle_cores(1)
        self.resumed_from: SaveId | None = None
        self.skipped = 0
        if self.place.rank == 0:
            warn_of_another_directory(deletion_strategy, self.directory)
            options.flash.report()
        asked = wishes(self.directory, deletion_strategy, self.verify, options.remote, options.remote_deletion_strategy)
        self.link = SaverClient(asked, self.place, saver_address(self.place, self.settings))
        stacks = offer() if self.place.agent and self.settings.hang_timeout != "off" else 0
        self.beats = Heartbeat(self.link.line, self.place.restart_count, stacks)
        lanes = DeviceStreams()
        self.overlap = Overlap(optimizers, lanes, self.beats.stall, check=self.settings.check_overlap)
        self._departures = Departures(self.directory, self.place)
        self._turns = PersistTurns(self.directory, self.place, self.link.status)
        self._snapshots = Snapshotter(
            self.link, self.threads, lanes, self.overlap, self._departures, weights_only=options.weights_only
        )
        self._cleaner = DeletionRunner(None if self.place.rank else deletion_strategy, self.directory, self.link.news)
        self._last: SaveId | None = None
        self._held: SaveId | None = None
        self.loads = 0
        self._past: Ranges = ()
        self._member = Member(self.directory, self.place.rank, lambda: self.link.history)
        self._in_step: dict[str, int] = {}
        self._is_first = True
        self._rollback: dict[str, Any] = {}
        self._attempt = ""
        self._launches: list[str] = []
        self._pid = os.getpid()
        self._closed = False

    def prepare(self, states: Mapping[str, Any]) -> None:
        """Have memory made ready for states like these; raises ArenaTooSmall."""
        self.be_ready()
        self._snapshots.prepare(states)

    def save(
        self,
        step: int,
        states: Mapping[str, Any],
        storage_type: StorageType | None,
        path: str,
        metrics: Mapping[str, float] | None = None,
        details: Mapping[str, Any] = MappingProxyType({}),
    ) -> SaveResult:
        """Save the states as files of these names; ``details`` (JSON) are kept with them.

        Without a storage type, and without metrics, newer saves may be persisted in the place of this one.

        Raises:
            StepError: The step is older than one saved since the last resume.
            ConfigError: A metric is no finite number.
            NotLoadable, ArenaTooSmall: The save cannot be made; the checkpoints before it stay.
        """
        self.be_ready()
        save, path = self.save_id(step), target_in(self.directory, path)
        place = at_least(storage_type, metrics)
        measures = dict(details) | ({"metrics": retention.checked(metrics)} if metrics else {})
        late, overtakable = self._hear_of_pending(), place is None
        wish = SaveRequest(place is not StorageType.MEMORY, overtakable, overtakable and self._turns.comes(save))
        if save == self._held:
            return self._save_again(save, wish, path, measures, late)
        if self._is_first and not (self.place.rank or self.resumed_from or self._rollback):
            warn_of_unloaded(self.link, save)
        self._is_first = False
        self._last = save
        self._in_step = self._member.save(save)
        with self.beats.save(save.step):
            outcome = self._snapshots.save(save, states, wish=wish, details=self._details(path) | measures)
        if outcome.skipped:
            self.skipped += 1
            counts["skipped_saves"] += 1
        else:
            self._held = save
        self._cleaner.clean_up()
        trouble = "; ".join(filter(None, (late, outcome.trouble)))
        return SaveResult(not outcome.skipped, save.step, outcome.skipped, self.skipped, trouble, outcome.pending)

    def begin(self, step: int, states: Mapping[str, Any]) -> str:
        """Copy a part of a step that `save` makes whole, as that does; why it was not copied, empty if it was."""
        self.be_ready()
        with self.beats.stall("save"):
            return self._snapshots.save(self.save_id(step), states, commit=False).skipped

    def refusal(self, step: int) -> str:
        """Why the saver skips a save, of which it is told so that it counts it; empty if it does not."""
        return self._snapshots.refusal(self.save_id(step))

    def _hear_of_pending(self) -> str:
        """Take note of what became of saves that were pending; what is to be told of them, empty for nothing."""
        told = []
        for save, outcome in self.overlap.endings():
            if outcome.skipped:
                self.skipped += 1
                counts["skipped_saves"] += 1
                self._held = None if self._held == save else self._held
            told.append(f"{save} was not saved: {outcome.skipped}" if outcome.skipped else outcome.trouble)
        return "; ".join(filter(None, told))

    def _save_again(
        self, save: SaveId, wish: SaveRequest, path: str, measures: dict[str, Any], trouble: str
    ) -> SaveResult:
        """Memory holds this state: it may be that only now it was measured, or is to be persisted."""
        with self.beats.stall("save"):
            try:
                if measures:
                    self._snapshots.add_details(measures)
            except OSError as error:
                trouble = f"the metrics of {save} could not be kept: {error}"
            if wish.persist:
                trouble = self._snapshots.notify(save, wish, path=path) or trouble
        return SaveResult(True, save.step, "memory held it already", self.skipped, trouble)

    def wait(self, timeout: float) -> int | None:
        """Wait until nothing is on its way to storage; the step of the newest durable checkpoint, None if none is.

        Raises:
            TimeoutError: It takes longer than ``timeout`` seconds.
            PersistError: The newest persist has failed for good.
        """
        self.be_ready()
        end = time.monotonic() + timeout
        with self.beats.stall("wait", timeout):
            while (status := self.link.status()).waiting:
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"{status.waiting} checkpoints are not durable after {timeout:g} s; {status.trouble}"
                    )
                time.sleep(0.01)
        self._cleaner.clean_up()
        if status.trouble:
            raise PersistError(status.trouble)
        return status.newest[1] if status.newest else None

    def glance(self) -> Status | None:
        """How far persistence is; None while a save is pending, or if nobody answers."""
        if self.overlap.pending:
            return None
        try:
            return self.link.status()
        except FastckptError:
            return None

    def open_history(self, ranks: Agreement, resume_path: str) -> dict[str, Any]:
        """Let later saves belong to a new history, the same on all ranks: the job goes on from another point.

        After a rollback to ``resume_path`` each save carries that fact. Returns how to know such saves by their
        details, for restarted workers that ask for the same rollback again; empty if it is asked for anew.

        Raises ConfigError, in all ranks, if they do not ask for the same, or nodes do not share the directory.
        """
        if self._last is not None:
            self.go_on(self._last.history)
            self.link.next_history()
            self._last = self._held = None
        asked = {"resume_path": resume_path, "verify": self.verify, "remote": self.link.wishes.remote}
        seen = mark_seen(self.directory, self.place)
        said = ranks.gather([self.link.history, launch_of(self.place), secrets.token_hex(8), asked, seen])
        histories, launches, (self._attempt, *_), wishes, marks = zip(*said, strict=True)
        launch, self._launches = launches[0], sorted(set(launches))
        check_alike(wishes)
        check_shared(ranks, self.directory, self.place, marks)
        self.link.history = max(histories)
        self._rollback = {"rollback": [launch, normalised(resume_path)]} if resume_path else {}
        self.loads += 1
        return self._rollback if self.loads == 1 else {}

    def go_on_from(self, resumed: ResumeResult) -> None:
        """Let later saves be of the line of training of what was loaded, if anything was."""
        self._member.load(resumed.id, resumed.details)
        if resumed.state is None:
            return
        self.resumed_from = resumed.id
        self._past = ()
        if resumed.id is not None and not resumed.elsewhere:
            self._past = past(resumed.details, None)
            self.go_on(resumed.id.history)

    def go_on(self, history: int) -> None:
        """Let later saves, of whatever history, be of the line of this one."""
        self._past = merged(self._past, [(history, history)])

    @property
    def pairing(self) -> Pairing:
        """What the next load is held to, for the sake of other checkpointers of this job."""
        return self._member.pairing(self.settings.arenas, self.place.group_rank)

    def close(self, lends: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Take leave; without fastckpt-run, the last writer waits for the last flush. Does nothing the second time.

        Args:
            lends: What later saves of the others take as this rank's part, by names of files: its states as of its
                last save. Without any, or if an exception ends this rank, there are no later ones.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._member.leave()
        try:
            self._snapshots.close()
        finally:
            failed = _is_failing()
            goodbye = self._goodbye({} if failed else lends)
            self.beats.close()
            self._cleaner.close()
            self.link.close(goodbye)
            if not self.place.agent:
                leave_own_saver(failed=failed)

    def _goodbye(self, lends: Mapping[str, Any]) -> Goodbye:
        self._hear_of_pending()
        sizes: dict[str, int] = {}
        try:
            sizes = self._snapshots.lend(self._last, lends)
        except FileNotFoundError:
            logger.warning("rank %d leaves no state for later saves: the memory of the job is gone", self.place.rank)
        except Exception as error:  # noqa: BLE001 (whatever a state does: the others must hear that this rank leaves)
            logger.warning("rank %d cannot lend its state to later saves: %s", self.place.rank, error)
        history = self.link.history
        if not sizes:
            self._departures.announce(history, self._held)
        return Goodbye(history, sizes, self._details("") if sizes else {}, list(self._departures.found(history)))

    def save_id(self, step: int) -> SaveId:
        """The id of a save of this step made now; raises StepError."""
        step = arguments.whole_step(step)
        if not 0 <= step <= LARGEST:
            raise StepError(f"step {step} is out of range; give whole numbers from 0 to {LARGEST}")
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
            "rank": self.place.rank,
            "num_threads": torch.get_num_threads(),
            "path": path,
            "parent": list(self.resumed_from) if self.resumed_from else None,
            HISTORIES: [list(run) for run in self._past],
            ROUND: self._attempt or f"{launch_of(self.place)} {self.link.history}",
            **self._rollback,
            **({BESIDE: self._in_step} if self._in_step else {}),
            **({"node": self.place.group_rank, "nodes": nodes, "attempt": self._attempt} if nodes > 1 else {}),
            **({MEMBERS: self._launches} if nodes > 1 else {}),
        }

    def be_ready(self) -> None:
        """Wait until no save is pending; raise FastckptError after `close`, and in a forked process."""
        if os.getpid() != self._pid:
            raise FastckptError("a checkpointer belongs to the process that made it, not to one forked from it")
        if self._closed:
            raise FastckptError("the checkpointer is closed: nothing is saved or loaded after close(); make another")
        self.overlap.wait()


class WithWriter:
    """What every checkpointer is that saves with a `Session`: open until it is closed, or the with block ends."""

    _writer: Session

    def close(self) -> None:
        """End saving. Without fastckpt-run the last checkpoint in memory is durable at the latest when rank 0 exits."""
        self._writer.close()

    @public
    def wait_latest_checkpoint(self, timeout: float = 1800) -> int | None:
        """Wait until all that was saved with DISK is durable in the checkpoint directory, if not yet in ``remote``.

        Of saves that newer ones may overtake, the newest is.

        Args:
            timeout: Seconds.

        Returns:
            The step of the newest durable checkpoint; None if there is none.

        Raises:
            TimeoutError: It takes longer.
            PersistError: The newest persist has failed for good.
        """
        return self._writer.wait(arguments.seconds("timeout", timeout))

    def _skip(self, step: int, reason: str, *, is_final: bool = False) -> SaveResult:
        """Skip a save; ``is_final`` says that a rank has closed, so that no later one can be made either."""
        reason = (self._writer.refusal(step) if is_final else "") or reason
        self._writer.skipped += 1
        counts["skipped_saves"] += 1
        logger.warning("step %d was not saved: %s", step, reason)
        return SaveResult(False, step, reason, self._writer.skipped)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_failing() -> bool:
    """Whether an exception, or an exit with an error, is under way: also where a finally clause closes."""
    error = sys.exception()
    return error is not None and not (isinstance(error, SystemExit) and not error.code)
