"""A session: the saves, resumes and waits that the checkpointers of all frameworks share."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from fastckpt._core import arguments
from fastckpt._core.client import run_record
from fastckpt._core.client.collective import Agreement, agreement
from fastckpt._core.client.connection import SaverClient
from fastckpt._core.client.deletion_runner import DeletionRunner
from fastckpt._core.client.departures import Departures
from fastckpt._core.client.flash_options import FlashOptions
from fastckpt._core.client.folded_tracebacks import fold_lost_connections
from fastckpt._core.client.heartbeat import Heartbeat
from fastckpt._core.client.job_store import explain_stale_addresses
from fastckpt._core.client.save_results import SaveRequest, SaveResult, StorageType, at_least
from fastckpt._core.client.saver_options import saver_options
from fastckpt._core.config import RankInfo, Settings, proof_folder, trial_record
from fastckpt._core.format.ids import LARGEST, SaveId
from fastckpt._core.in_process_saver import leave_own_saver, saver_address
from fastckpt._core.io.modes import choose
from fastckpt._core.ipc.messages import Goodbye, Status
from fastckpt._core.memory.stacks import offer
from fastckpt._core.metrics import counts, write_events_to
from fastckpt._core.policy import retention
from fastckpt._core.policy.verify import verify_mode
from fastckpt._core.preflight import make_ready
from fastckpt._core.resume.candidates import CandidateFinder, RequiredFiles
from fastckpt._core.resume.directory_checks import warn_of_unloaded
from fastckpt._core.resume.load_reports import LoadReports
from fastckpt._core.resume.resume import Resume, ResumeResult, Share
from fastckpt._core.retention import CheckpointDeletionStrategy, policy_of, warn_of_another_directory
from fastckpt._core.schedule.persist_turns import PersistTurns
from fastckpt._core.session_history import SessionHistory
from fastckpt._core.snapshot.overlap import Overlap, optimizers_in
from fastckpt._core.snapshot.rng_state import rng_state
from fastckpt._core.snapshot.snapshotter import Snapshotter
from fastckpt._core.storage.store import is_url, normalised, target_in
from fastckpt._core.transfer.device_streams import DeviceStreams
from fastckpt._core.transfer.host_copy import idle_cores
from fastckpt.errors import ConfigError, FastckptError, PersistError, StepError

__all__ = ["SaveResult", "Session", "SessionOptions", "StorageType"]

logger = logging.getLogger("fastckpt")

explain_stale_addresses()  # here: the process group is formed before a checkpointer is made


@dataclass(frozen=True)
class SessionOptions:
    """Options that all checkpointers take by name; `DdpCheckpointer` documents each."""

    weights_only: bool = True
    verify: str = "resume"
    overlap: Optimizer | Iterable[Optimizer] | None = None
    remote: str | os.PathLike[str] = ""
    remote_deletion_strategy: CheckpointDeletionStrategy | None = None
    flash: FlashOptions = field(default_factory=FlashOptions)


DEFAULTS = SessionOptions()


class OpenResume(NamedTuple):
    """A resume of all ranks that has begun.

    Attributes:
        ranks: The agreement of all ranks of the job.
        finder: Finds the candidates of this rank; to be closed after the load.
        resume: Has the ranks choose.
        since: Details of saves since the same rollback; empty for none.
    """

    ranks: Agreement
    finder: CandidateFinder
    resume: Resume
    since: dict[str, Any]


class Session:
    """Saves the states of one worker to one checkpoint directory; each state is a file of the checkpoint."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        deletion_strategy: CheckpointDeletionStrategy | None = None,
        options: SessionOptions = DEFAULTS,
    ) -> None:
        # 1. check the arguments   2. make the directory ready   3. connect to the saver, which may refuse the directory
        # 4. install the heartbeat and the overlap, whose hooks run at each optimizer step
        optimizers = optimizers_in(options.overlap)
        self.verify, self.weights_only = verify_mode(options.verify), options.weights_only
        self.place, self.settings = RankInfo.from_environment(), Settings.from_environment()
        if self.place.contradiction:
            raise ConfigError(self.place.contradiction)
        fold_lost_connections(self.place)
        write_events_to(self.settings.events)
        choose(self.settings.mode)
        self.directory = normalised(arguments.directory(checkpoint_dir))
        if record := proof_folder():
            run_record.begin(Path(record), self.directory, self.place, rng_state)
        if not is_url(self.directory):
            make_ready(self.directory, self.place)
        self.threads = self.settings.fill_threads or idle_cores()
        self.skipped = 0
        if self.place.rank == 0:
            warn_of_another_directory(deletion_strategy, self.directory)
            options.flash.report()
        # A script that `fastckpt plan` or `prove` runs stores nothing outside of its own directory, which is empty.
        self._is_trial = bool(trial_record() or proof_folder())
        remote = ("", None) if self._is_trial else (options.remote, options.remote_deletion_strategy)
        asked = saver_options(self.directory, deletion_strategy, self.verify, *remote)
        self.link = SaverClient(asked, self.place, saver_address(self.place, self.settings))
        stacks = offer() if self.place.agent and self.settings.hang_timeout != "off" else 0
        parts = bool(self.place.agent) and self.settings.slow_ranks
        self.beats = Heartbeat(self.link.line, self.place.restart_count, stacks, parts=parts)
        streams = DeviceStreams()
        self.overlap = Overlap(optimizers, streams, self.beats.stall, check=self.settings.check_overlap)
        several = self.place.group_world_size > 1
        self._departures = Departures(self.directory, self.place) if several else None
        self._turns = PersistTurns(self.directory, self.place, self.link.status) if several else None
        self._snapshots = Snapshotter(
            self.link, self.threads, streams, self.overlap, self._departures, weights_only=options.weights_only
        )
        self._cleaner = None
        if deletion_strategy is not None and policy_of(deletion_strategy) is None and self.place.rank == 0:
            self._cleaner = DeletionRunner(deletion_strategy, self.directory, self.link.news)
        self._last: SaveId | None = None
        self._held: SaveId | None = None
        self.loads = LoadReports(self.link, self.beats, self.place.rank)
        self.history = SessionHistory(self.link, self.place, self.settings)
        self._is_first = True
        self._pid = os.getpid()
        self._closed = False

    @property
    def ranks(self) -> Agreement:
        """The agreement of all ranks of the job; raises FastckptError without a process group, or in a forked process.

        A fork must not send its errors to the ranks.
        """
        self._check_process()
        return agreement(self.place.world_size)

    @property
    def saver_pid(self) -> int:
        """The process of the saver; 0 if it is a thread of a rank."""
        return self.link.saver_pid if self.place.agent else 0

    def prepare(self, states: Mapping[str, Any]) -> None:
        """Reserve memory for states like these, in the background; raises ArenaTooSmall."""
        self.be_ready()
        self._snapshots.prepare(states)

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Reserve memory for images of these sizes in bytes, in the background, if there is enough of it."""
        try:
            self._snapshots.expect(sizes)
        except FastckptError as error:
            logger.debug("no memory is reserved ahead: %s", error)  # a save that needs it raises the error

    def expect_about(self, sizes: dict[str, int]) -> None:
        """Have pages made for images of about these sizes in bytes, in the background, if there is ample room."""
        with suppress(FastckptError):  # a save raises the error
            self.link.reserve_about(sizes)

    def save(
        self,
        step: int,
        states: Mapping[str, Any],
        storage_type: StorageType | None,
        path: str,
        metrics: Mapping[str, float] | None = None,
        details: Mapping[str, Any] = MappingProxyType({}),
    ) -> SaveResult:
        """Save the states as files of these names; ``details`` (JSON) are saved with them.

        Without a storage type and without metrics, a newer save may be persisted instead of this one.

        Raises:
            StepError: The step is older than one saved since the last resume.
            ConfigError: A metric is no finite number.
            NotLoadable, ArenaTooSmall: The save cannot be made; the checkpoints before it stay.
        """
        self.be_ready()
        # 1. report results of pending saves   2. copy the state into memory, and commit, or leave the rest to a
        # thread (Snapshotter.save)   3. run the user's deletion strategy on newly durable saves
        save = self.save_id(step)
        path = target_in(self.directory, path, save) if path and not self._is_trial else ""
        place = at_least(storage_type, metrics)
        measures = dict(details) | ({"metrics": retention.checked(metrics)} if metrics else {})
        late, overtakable = self._note_pending(), place is None
        agreed = overtakable and self._turns is not None and self._turns.comes(save)
        request = SaveRequest(place is not StorageType.MEMORY, overtakable, agreed)
        if save == self._held:  # a second save of a step, such as to storage after memory
            return self._save_again(save, request, path, measures, late)
        if self._is_first and not self.place.rank and self.history.is_new:
            warn_of_unloaded(self.link, save)
        self._is_first = False
        self._last = save
        details = self._details(path, save) | measures
        with self.beats.save(save.step):
            outcome = self._snapshots.save(save, states, request=request, details=details)
        if outcome.skipped:
            self._count_skipped()
        else:
            self._held = save
        self._clean_up()
        trouble = "; ".join(filter(None, (late, outcome.trouble)))
        return SaveResult(not outcome.skipped, save.step, outcome.skipped, self.skipped, trouble, outcome.pending)

    def begin(self, step: int, states: Mapping[str, Any]) -> str:
        """Copy a part of a step that a later `save` completes; returns why it was not copied, empty if it was."""
        self.be_ready()
        with self.beats.stall("save"):
            return self._snapshots.save(self.save_id(step), states, commit=False).skipped

    def skip(self, step: int, reason: str, *, is_final: bool = False) -> SaveResult:
        """Skip a save; ``is_final`` if a rank has closed, so that no later one can be made either."""
        reason = (self._snapshots.refusal(self.save_id(step)) if is_final else "") or reason
        self._count_skipped()
        logger.warning("step %d was not saved: %s", step, reason)
        return SaveResult(False, step, reason, self.skipped)

    def _count_skipped(self) -> None:
        self.skipped += 1
        counts["skipped_saves"] += 1

    def _clean_up(self) -> None:
        """Run the user's own deletion strategy, if there is one, on newly durable saves."""
        if self._cleaner:
            self._cleaner.clean_up()
        else:
            self.link.news.clear()

    def _note_pending(self) -> str:
        """Record the outcomes of saves that were pending; returns their troubles, empty for none."""
        reports = []
        for save, outcome in self.overlap.endings():
            if outcome.skipped:
                self._count_skipped()
                self._held = None if self._held == save else self._held
            reports.append(f"{save} was not saved: {outcome.skipped}" if outcome.skipped else outcome.trouble)
        return "; ".join(filter(None, reports))

    def _save_again(
        self, save: SaveId, request: SaveRequest, path: str, measures: dict[str, Any], trouble: str
    ) -> SaveResult:
        """Add metrics to a save that memory holds already, or have it persisted."""
        with self.beats.stall("save"):
            try:
                if measures:
                    self._snapshots.add_details(measures)
            except OSError as error:
                trouble = f"the metrics of {save} could not be kept: {error}"
            if request.persist:
                trouble = self._snapshots.notify(save, request, path=path) or trouble
        return SaveResult(True, save.step, "memory already holds this step", self.skipped, trouble)

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
        self._clean_up()
        if status.trouble:
            raise PersistError(status.trouble)
        return status.newest[1] if status.newest else None

    def glance(self) -> Status | None:
        """The progress of persists; None while a save is pending, or if the saver does not answer."""
        if self.overlap.pending:
            return None
        try:
            return self.link.status()
        except FastckptError:
            return None

    def open_resume(self, needs: RequiredFiles, share: Share, asked: str) -> OpenResume:
        """Open a new history, and prepare a resume of all ranks; all ranks call it.

        Args:
            needs: The files that make a checkpoint one of this kind, and whole for this rank.
            share: Selects the files of a checkpoint that this rank checks.
            asked: The path that the user gave; empty for the newest checkpoint.

        Raises ConfigError, in all ranks, if they do not ask for the same, or nodes do not share the directory.
        """
        self.be_ready()
        ranks = self.ranks
        since = self.open_history(ranks, asked)
        finder = CandidateFinder(self.link, self.directory, needs, digests=self.verify != "never")
        return OpenResume(ranks, finder, Resume(self.link, finder, share, self.threads, self.history.pairing), since)

    def resumed(self, resumed: ResumeResult, seconds: float) -> None:
        """Make the loaded checkpoint, if any, the parent of later saves, and report the load."""
        self.history.go_on_from(resumed)
        self.loads.loaded(resumed, seconds)

    def release(self) -> None:
        """Let the saver reuse the memory that a load holds, if one does."""
        self.link.release()

    def open_history(self, ranks: Agreement, resume_path: str) -> dict[str, Any]:
        """Open a history, as `SessionHistory.open`: the saves so far belong to an older one."""
        if self._last is not None:
            self.history.go_on(self._last.history)
            self.link.next_history()
            self._last = self._held = None
        return self.history.open(ranks, resume_path, self.verify)

    def begin_history(self) -> None:
        """Let the next save be newer than all before, even if it is of the same step. All ranks call it."""
        self.be_ready()
        self.history.go_on(self.link.history)
        self.link.next_history()
        self.link.history = max(self.ranks.gather(self.link.history))

    def overlap_with(
        self, optimizers: Sequence[Optimizer], derived: Callable[[], Iterable[torch.Tensor]] = tuple
    ) -> None:
        """Copy tensors that only the steps of these optimizers change in the background, from the next save on."""
        self.overlap.defer(optimizers, derived)

    def count_steps(self, clock: Callable[[], int] | None) -> None:
        """Count the steps of training by ``clock``, not by those of optimizers; None if the script names each."""
        self.beats.clock, self.beats.by_script = clock, clock is None

    def reach(self, step: int) -> None:
        """Report a step that the script names."""
        self.beats.reach(step)
        run_record.reach(step)

    def work(self, name: str) -> AbstractContextManager[None]:
        """Report that this process works on a phase of this name."""
        return self.beats.work(name)

    def stall(self, name: str, timeout: float | None = None) -> AbstractContextManager[None]:
        """Report that training waits for a phase of this name, which ends by itself after ``timeout`` seconds."""
        return self.beats.stall(name, timeout)

    def close(self, lends: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Deregister; without fastckpt-run, the last writer waits for the last flush. A second call does nothing.

        Args:
            lends: The states as of this rank's last save, by names of files, which later saves of the others take as
                its part. Without any, or if an exception ends this rank, there are no later saves.
        """
        # 1. finish the copy in the background   2. lend this rank's state to later saves of the others
        # 3. end the heartbeat and the user's deletion strategy   4. deregister from the saver
        # 5. end a saver in this process, after its last flush
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.history.leave()
        try:
            self._snapshots.close()
        finally:
            failed = is_failing()
            goodbye = self._goodbye({} if failed else lends)
            self.beats.close()
            if self._cleaner:
                self._cleaner.close()
            self.link.close(goodbye)
            if not self.place.agent:
                leave_own_saver(failed=failed)

    def _goodbye(self, lends: Mapping[str, Any]) -> Goodbye:
        self._note_pending()
        sizes: dict[str, int] = {}
        try:
            sizes = self._snapshots.lend(self._last, lends)
        except FileNotFoundError:
            logger.warning(
                "later saves cannot take over the state of rank %d: the memory of the job is gone", self.place.rank
            )
        except Exception as error:  # noqa: BLE001 (a user's state may raise anything; the others must learn of the end)
            logger.warning(
                "later saves cannot take over the state of rank %d, which closes: %s", self.place.rank, error
            )
        history = self.link.history
        if not sizes and self._departures:
            self._departures.announce(history, self._held)
        closed = self._departures.found(history) if self._departures else ()
        return Goodbye(history, sizes, self._details("") if sizes else {}, list(closed))

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

    def _details(self, path: str, save: SaveId | None = None) -> dict[str, Any]:
        return {
            "world_size": self.place.world_size,
            "rank": self.place.rank,
            "num_threads": torch.get_num_threads(),
            "path": path,
            **self.history.details(save),
        }

    def be_ready(self) -> None:
        """Wait until no save is pending; raise FastckptError after `close`, and in a forked process."""
        self._check_process()
        if self._closed:
            raise FastckptError("the checkpointer is closed: nothing is saved or loaded after close(); make another")
        self.overlap.wait()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise FastckptError("a checkpointer belongs to the process that made it, not to one forked from it")


def is_failing() -> bool:
    """Return whether an exception, or an exit with an error, is under way: also where a finally clause closes."""
    error = sys.exception()
    return error is not None and not (isinstance(error, SystemExit) and not error.code)
