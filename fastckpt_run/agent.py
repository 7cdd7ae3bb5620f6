"""torch's elastic agent with a saver: it outlives its workers, and so do the checkpoints in memory."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch.distributed.run as torchrun
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousTimeoutError

from fastckpt._core import metrics
from fastckpt._core.config import AGENT_VARIABLE, PLACE_VARIABLE, Settings
from fastckpt._core.policy.hosts.host_exclusion import cause_of_host
from fastckpt._core.saver.server import Saver
from fastckpt.errors import ConfigError, FastckptError
from fastckpt_run.events.recorder import EventRecorder, outcome_of
from fastckpt_run.events.summary import log_course, report, require_durable
from fastckpt_run.exit_codes import Ending, ExitStatus
from fastckpt_run.failures.cause import (
    CAUSE_PATIENCE,
    CAUSE_PATIENCE_OF_SEVERAL,
    Cause,
    cause_of,
    cause_of_death,
    explain,
    with_cause,
)
from fastckpt_run.failures.deaths import Death, DeathWatch, describe
from fastckpt_run.failures.folded import folded, torch_lines
from fastckpt_run.failures.restart_notice import ELSEWHERE, RestartNotice
from fastckpt_run.failures.restarts import Restarts
from fastckpt_run.hangs.detector import HangWatch
from fastckpt_run.left_processes import LeftProcesses, kill_children
from fastckpt_run.members import Member
from fastckpt_run.node_check.node_check import NodeCheck, NodeCheckFailed
from fastckpt_run.peer_agents import PeerAgents
from fastckpt_run.preload.preloader import OFF, Preloader
from fastckpt_run.proof import persist_kills
from fastckpt_run.rendezvous.handler import FastckptRendezvousHandler
from fastckpt_run.rendezvous.meeting import closed_error
from fastckpt_run.script import require_script
from fastckpt_run.shutdown import close_with_timeout, given_up, signals_counted, signals_in
from fastckpt_run.torchrun_patches import HookedAgent, forget_last_round, stop_heartbeats, without_waits
from fastckpt_run.watch.watcher import Watcher
from fastckpt_run.workers import run_script_path

logger = logging.getLogger("fastckpt.launcher")

T = TypeVar("T")
_LOOK, _START = 1.0, 30.0
"""Seconds from one look at workers that run to the next, and after a start in which each wake is one."""
_HEARTBEAT = 5.0
"""Seconds to wait for the end of one that is under way."""


class FastckptAgent(HookedAgent):
    """Starts, watches and restarts the workers of this node as torch's agent does, with these differences.

    - It owns a saver; workers find its address and settings in their environment. After each stop of the
      workers the saver pins the newest checkpoint, and flushes it in the background. The end of the job,
      a signal included, waits for the last flush.
    - A death is noticed when it happens; ``monitor_interval`` is only the longest wait.
    - Workers that hang are killed, like those that died by themselves.
    - Workers that another's failure takes along are killed at once, or after ``stop_grace``, with their children;
      programs that they have started have a moment to clean up.
    - Each round starts with an empty store, so that restarted workers find each other.
    - There is no restart where it would be in vain; progress gives restarts back.
    - A group that is beyond repair is a failure, with an exit code of its own.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        settings: Settings,
        preloader: Preloader | None = None,
        node_check: NodeCheck | None = None,
        status: ExitStatus | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(spec, **arguments)
        self._job_settings = settings
        self._saver = Saver(settings)
        self._recorder = EventRecorder(self._saver, keep=settings.event_log)
        self._preloader = preloader or Preloader(OFF)
        self._watch, self._left = DeathWatch({}), LeftProcesses(spec.entrypoint)
        self._watcher = Watcher(settings, self._saver, self._recorder.lines, spec.rdzv_handler)
        self._hangs = HangWatch(settings.hang_timeout, self._saver.telemetry, self._watcher.channel)
        # torch sleeps this long before each call of _monitor_workers, which waits for events instead.
        self._longest_wait, spec.monitor_interval = spec.monitor_interval, 0.0
        if spec.entrypoint is torchrun.run_script_path:
            spec.entrypoint = run_script_path
        self._restarts = Restarts(settings, spec, self._saver.telemetry, self._preloader.last_words, self._hangs.killed)
        self._notice = RestartNotice(self._restarts.limit)
        self._peers = PeerAgents(settings, spec.rdzv_handler, self._saver, self._watcher.meet)
        self._node_check = node_check or NodeCheck(settings)
        self._left_out: list[Member] = []
        self._status = status or ExitStatus()
        self._failed_by = Ending.SCRIPT
        self._died: list[Death] = []
        self._started = self._due = 0.0
        if isinstance(spec.rdzv_handler, FastckptRendezvousHandler):
            spec.rdzv_handler.before_joining = self._preloader.wait
            spec.rdzv_handler.is_checked = settings.node_check
            spec.rdzv_handler.why_ended = lambda: self._notice.newest

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the job to its end, and its last flush to its end."""
        # 1. checks without workers: the script, the event log, the node   2. the saver, which outlives all workers
        # 3. the template, whose imports overlap with the rendezvous   4. torch's loop of rounds, to the job's end
        # 5. the last flush and the report, also after a signal   6. --require-persist
        require_script(self.get_worker_group().spec)
        self._open_events()
        self._watcher.begin()
        self._recorder.begin(self.get_worker_group().spec, self._watcher.url)
        persist_kills.begin()
        metrics.listen(self._notice.observe)
        self._saver.start()
        signals, outcome = 0, "failed"
        try:
            self._node_check.begin()
            self._preloader.begin(self.get_worker_group().spec)
            result: RunResult | None = super().run(role)
            self._explain(result)
            outcome = outcome_of(result)
            self._status.ending = self._failed_by if outcome == "failed" else None
        except SignalException as error:
            signals, outcome = signals_in(error), "stopped"
            raise
        finally:
            self._finish(signals, outcome)
        if result is None:  # torch swallows RendezvousGracefulExitError, and its launcher fails on the None
            logger.warning("this node waited without workers until the other nodes had ended the job")
            return RunResult(WorkerState.SUCCEEDED)
        # After the flush: only now are the durable saves known.
        newest = self._job_settings.require_persist
        # Of several nodes another one may make it durable when this one has ended.
        if not result.is_failed() and (newest or (self.get_worker_group().group_world_size or 1) == 1):
            require_durable(self._saver.report(), newest=newest)
        return result

    def _finish(self, signals: int, outcome: str) -> None:
        self._status.is_stored = False  # not known to be: a further signal may come at any line
        try:
            # From here on: a further signal that raised before the flush would skip it.
            with signals_counted(signals) as received:
                self._peers.close()
                self._preloader.close()  # first: no worker is forked any more, and the flush may take minutes
                close_with_timeout(self._saver, self._job_settings.flush_timeout, received, outcome)
                self._left.close()
        finally:
            self._left.close(at_once=True)
            found = self._saver.report()
            self._status.is_stored = all(stats.is_stored for stats in found)
            if signals and not stop_heartbeats(self.get_worker_group().spec.rdzv_handler, _HEARTBEAT):
                given_up.set()
            self._notice.end()
            report(found, self._job_settings)
            metrics.unlisten(self._notice.observe)
            self._recorder.look(now=True)
            self._watcher.close(outcome)  # only now: the last flush is watched, too
            self._recorder.end(outcome)
            log_course(self._recorder.lines, found, self._job_settings)

    def _open_events(self) -> None:
        try:
            metrics.write_events_to(self._job_settings.events)
        except OSError as error:
            raise ConfigError(f"events cannot be written to {self._job_settings.events}: {error.strerror}") from error

    def meet(self, proceed: Callable[[], None]) -> None:
        """Meet the other nodes, in a store that is empty."""
        group = self.get_worker_group()
        handler = group.spec.rdzv_handler
        self._or_leave(self._node_check.after_failure)
        with metrics.phase("launch.rendezvous"), without_waits(handler), self._recorder.meeting(group):
            try:
                while not self._met(proceed):
                    logger.warning("a round ended before all its agents had met; another one begins")
            except RendezvousTimeoutError as error:
                raise RendezvousTimeoutError(f"{error}{_whom_it_lacks(handler, self._left_out)}") from error

    def _met(self, proceed: Callable[[], None]) -> bool:
        """Meet once; False if the round ended meanwhile, because a node is gone that was to take part."""
        group = self.get_worker_group()
        handler = group.spec.rdzv_handler
        forget_last_round(handler)
        self._peers.rejoin()
        try:
            proceed()
            self._peers.meet(group)
            if self._checked_with_others():
                return True
        except RuntimeError:  # the base of torch's errors about stores
            if not isinstance(handler, FastckptRendezvousHandler) or not handler.ends_soon():
                raise
            if handler.is_given_up():
                self._or_leave(self._node_check.given_up)
        return False

    def _checked_with_others(self) -> bool:
        """Check the nodes of the round with each other; False if it has to end without one of them."""
        group = self.get_worker_group()
        handler, store = group.spec.rdzv_handler, cast(Any, group.store)
        is_ours = isinstance(handler, FastckptRendezvousHandler)
        is_over = partial(_is_awaited, handler) if is_ours else lambda: False
        members, rank = self._peers.members, group.group_rank or 0
        bad = self._or_leave(lambda: self._node_check.with_others(store, members, rank, is_over))
        if bad is not None:
            self._peers.checked()
        if bad:
            self._left_out += bad
            self._peers.go_on_without(bad)
        return not bad

    def _or_leave(self, check: Callable[[], T]) -> T:
        """Run a check of this node and return its result; if it fails, the other nodes go on without this one."""
        try:
            return check()
        except NodeCheckFailed:
            handler = self.get_worker_group().spec.rdzv_handler
            if isinstance(handler, FastckptRendezvousHandler):
                handler.leave()  # torch's launcher would end the job for all
            raise

    def worker_environment(self, local_rank: int) -> dict[str, str]:
        """The address of the saver, the place of a worker, and the settings of the job."""
        place = f"{self.get_worker_group().workers[local_rank].global_rank} {local_rank}"
        return {AGENT_VARIABLE: self._saver.address, PLACE_VARIABLE: place, **self._job_settings.to_environment()}

    def start_workers(self, proceed: Callable[[], dict[int, Any]]) -> dict[int, Any]:
        """Start the workers, and watch them from then on."""
        # Before the workers exist: telemetry that is older than this instant is their predecessors'.
        self._restarts.started()
        self._preloader.prepare()
        self._left.wait_before_start()
        pids, worker_group = proceed(), self.get_worker_group()
        torch_lines.follow(self.context)
        self._watch, self._died = DeathWatch(pids), []
        self._started = self._due = time.monotonic()
        self._hangs.started(pids, worker_group.workers)
        self._watcher.started(pids, worker_group.workers)
        metrics.event(
            "workers_started",
            pids=pids,
            restart_count=worker_group.spec.max_restarts - self.restarts_left,
            world_size=worker_group.workers[0].world_size,
            master_port=worker_group.master_port,
        )
        return pids

    def monitor(self, proceed: Callable[[], RunResult]) -> RunResult:
        """Wait for a death, a hang or the longest wait; then have torch look."""
        # 1. wait   2. deaths, those of killed culprits included: record them, let copies in shared memory end
        # 3. work that must not delay a death: the template, the event log, notices   4. torch reads the exit codes
        # 5. decide on restarts, before torch does by the number that is left
        died = self._watch.wait(min(self._longest_wait, self._hangs.interval))
        if not died and not self._is_due():
            return RunResult(WorkerState.HEALTHY)  # torch looks for nodes that join at each wake; all else can wait
        # Only without a death: ranks that wait for a dead one would look like a hang.
        if not died and self._hangs.is_due and self._end_hang():
            died = self._watch.wait(0.0)
        deaths = self._with_causes([death for death in died if death.exitcode])
        for death in deaths:
            self._record_death(death)
        if deaths:
            self._prepare_stop({death.local_rank for death in (*died, *deaths)}, deaths)
        self._preloader.maintain()
        self._recorder.look()
        self._notice.look(self.restarts_left)
        self._peers.join_awaited()
        # torch's own look reaps the dead: exit codes were peeked at before, without reaping.
        result = proceed()
        if result.state == WorkerState.SUCCEEDED:
            metrics.event("workers_finished")
            return result
        return self._leave_round(result) if self._peers.may_rejoin else self._judge(result, deaths)

    def _with_causes(self, deaths: list[Death]) -> list[Death]:
        def cause(death: Death) -> Cause:
            return cause_of_death(death, self._preloader.last_words(death.pid), self.context)

        alone = (self.get_worker_group().group_world_size or 1) == 1
        patience = CAUSE_PATIENCE if alone else CAUSE_PATIENCE_OF_SEVERAL
        return with_cause(deaths, self._watch, cause, lambda: bool(self._elsewhere()), patience)

    def _elsewhere(self) -> str:
        """Describe why another node ended the round before these workers failed; empty if that is not known."""
        group = self.get_worker_group()
        return _elsewhere(group.spec.rdzv_handler) if (group.group_world_size or 1) > 1 else ""

    def _is_due(self) -> bool:
        """Return whether checks other than for deaths are due: often during a start, then once a second."""
        now = time.monotonic()
        if now < self._due and not self._hangs.is_due:
            return False
        self._due = now + (_LOOK if now > self._started + _START else 0.0)
        return True

    def _end_hang(self) -> bool:
        are_killed = self._hangs.end_hang(may_restart=self._restarts.would_restart(self.restarts_left))
        if not are_killed and self._hangs.is_told:
            self._peers.part()
        return are_killed

    def _judge(self, result: RunResult, deaths: Sequence[Death]) -> RunResult:
        """Decide how to go on after workers that failed, or must be stopped."""
        if result.state == WorkerState.UNHEALTHY or (result.state == WorkerState.HEALTHY and self._saver.lost):
            return self._stop_at_once()
        if result.is_failed() and not deaths:  # it died after the wait, or only torch can read its exit code
            first = min(result.failures.values(), key=lambda failure: failure.timestamp)
            self._record_death(Death(first.local_rank, first.pid, first.exitcode))
        if result.is_failed():
            self._or_leave(partial(self._node_check.failed, self._saver.misplaced))
            self._allow(self._restarts.failed(result.failures, self.context, self.restarts_left))
            self._failed_by = Ending.LOST_WORKERS if self._restarts.may_go_on else Ending.SCRIPT
            self._end_if_lost()
            self._report_failures(result)
        return result

    def _leave_round(self, result: RunResult) -> RunResult:
        """Have the workers stopped, whether they failed or not: other nodes of the job go on; no restart is counted."""
        logger.error("stopping the workers: %s", self._saver.lost)
        self._peers.leave_round()
        if result.state != WorkerState.HEALTHY:
            self._allow(1)
        return result

    def _report_failures(self, result: RunResult) -> None:
        group, culprits = self.get_worker_group(), dict[int, tuple[int, Cause]]()
        died = {group.workers[death.local_rank].global_rank for death in self._died} & result.failures.keys()
        for rank in sorted(died or result.failures):  # torch may name another one first than we have seen
            failure = result.failures[rank]
            cause = cause_of(failure, self._preloader.last_words(failure.pid), self.context)
            culprits[rank] = failure.exitcode, cause
        # Who has only lost a connection is named if nobody has failed by itself.
        culprits = {rank: why for rank, why in culprits.items() if not why[1].is_lost_connection} or culprits
        nodes, handler = group.group_world_size or 1, group.spec.rdzv_handler
        first = self._elsewhere()
        if isinstance(handler, FastckptRendezvousHandler) and not first:
            causes = (cause_of_host(exitcode, cause.exception) for exitcode, cause in culprits.values())
            handler.fault = next(filter(None, causes), "")
        ranks = {worker.local_rank: worker.global_rank for worker in group.workers}
        if text := folded(self.context, ranks, culprits, first):
            logger.error("%s", text)
        self._notice.failed(culprits, self.restarts_left, nodes=nodes, first=first)
        if isinstance(handler, FastckptRendezvousHandler) and not self.restarts_left:
            handler.set_closed()  # before the last flush: workers of other nodes fail for want of these, and know why

    def _prepare_stop(self, dead: set[int], failed: Sequence[Death]) -> None:
        """Some workers have failed: let the others' memory be as new as it can before they are stopped."""
        # An exit code above 0 is an exception of the script, after which the others' copies are worth waiting for.
        if any((death.exitcode or 0) > 0 for death in failed):
            self._attempt(partial(self._saver.let_copies_end, dead))
        if self._job_settings.stop_grace:  # the newest checkpoint need not wait for workers to end
            self._attempt(self._saver.flush)

    def _allow(self, restarts: int) -> None:
        """Change the number of restarts left, but not the number made: torch names each round by it."""
        self.restarts_left += restarts
        self.get_worker_group().spec.max_restarts += restarts

    def restart_workers(self, proceed: Callable[[], None]) -> None:
        """Restart the workers; each restart has a number of its own."""
        worker_group = self.get_worker_group()
        # `proceed` is torch's restart: `stop_workers` (kill, reap, pin and flush),
        # `meet` (a rendezvous with an empty store), `start_workers`.
        if worker_group.state == WorkerState.HEALTHY:  # torch has seen other nodes wait, and spends no restart
            self._restarts.interrupted()
            worker_group.spec.max_restarts += 1  # but this one, too, has a number of its own
            self._notice.interrupted(self.restarts_left)
        proceed()

    def stop_workers(self, proceed: Callable[[], None]) -> None:
        """Kill the workers; then the saver pins the newest checkpoint that they saved."""
        if self.context is not None:
            self.context.close()  # running workers are stopped for another node: as for a failure on this one
        if self._hangs.is_stuck:
            self._peers.part()
        proceed()
        self._recorder.look(now=True)
        metrics.event("workers_stopped", pids=[worker.id for worker in self.get_worker_group().workers])
        # After `proceed`: no worker writes to memory any more, so the newest slot can be pinned and flushed.
        self._attempt(self._saver.breakpoint)

    def _attempt(self, how: Callable[[], None]) -> None:
        try:
            how()
        except (FastckptError, OSError, TimeoutError):
            metrics.counts["breakpoint.failed"] += 1
            # Not raised: a restart without the flush is better than the end of the job.
            logger.exception("the newest checkpoint in memory could not be pinned; the job goes on")

    def shut_down(self, proceed: Callable[[], None], *, signalled: bool) -> None:
        """End the workers, and kill the rest of their process groups."""
        if signalled:  # workers may take long to end, and SIGKILL may follow the signal
            self._attempt(partial(self._saver.flush, ends=True))
        proceed()
        # Workers that torch was about to start when the signal came, and does not know of.
        kill_children(self._preloader.begun.difference(self.context.pids().values() if self.context else ()))
        handler = self.get_worker_group().spec.rdzv_handler
        if signalled and isinstance(handler, FastckptRendezvousHandler):
            handler.leave()  # before the last flush: the other nodes go on without this one
        self._watch.close()
        if self.context and self.get_worker_group().state != WorkerState.SUCCEEDED:
            # Children of workers outlive them in their process group,
            # and may hold ports, devices and the memory of images.
            self._left.leave(self.context.pids().values())

    def _record_death(self, death: Death) -> None:
        self._died.append(death)
        worker = self.get_worker_group().workers[death.local_rank]
        metrics.event(
            "worker_died",
            local_rank=death.local_rank,
            rank=worker.global_rank,
            worker_pid=death.pid,
            exitcode=death.exitcode,
            restarts_left=self.restarts_left,
        )
        logger.info(
            "worker %d (pid %d) died: %s; stopping all", worker.global_rank, death.pid, describe(death.exitcode)
        )

    def _end_if_lost(self) -> None:
        """Restart no workers if another job has superseded this one."""
        if not self._saver.may_start_over:
            self._failed_by = Ending.TAKEN_OVER
            self._allow(-self.restarts_left)

    def _stop_at_once(self) -> RunResult:
        """Kill workers that would train in vain, or that the kernel does not let run: torch would end with success."""
        assert self.context is not None
        stuck = [] if self._saver.lost else self.uninterruptible
        self._failed_by = Ending.STUCK if stuck else Ending.LOST_WORKERS
        if self._saver.lost:
            logger.error("stopping the workers: %s", self._saver.lost)
        self.context.close()
        self._end_if_lost()
        # Of workers that the kernel does not let run, only these failed; when the saver is lost, all did.
        failures = {
            worker.global_rank: ProcessFailure(worker.local_rank, worker.id, -9, error_file="")
            for worker in self.get_worker_group().workers
            if worker.id in stuck or not stuck
        }
        return RunResult(WorkerState.FAILED, failures=failures)

    def _explain(self, result: RunResult | None) -> None:
        if result is not None and self.context is not None:
            for failure in result.failures.values():
                explain(failure, self.context, self._hangs.killed, self._saver.lost)


def _whom_it_lacks(handler: RendezvousHandler, left_out: Sequence[Member]) -> str:
    """Nodes of the last round that do not come any more, in words; empty if there are none."""
    bad = {member.host for member in left_out}
    gone = set(handler.gone_hosts()) if isinstance(handler, FastckptRendezvousHandler) else set[str]()
    names = [f"{host} failed the node check" for host in sorted(bad)]
    names += [f"{host} was lost" for host in sorted(gone - bad)]
    return f". Of the last round, {', '.join(names)}" if names else ""


def _elsewhere(handler: RendezvousHandler) -> str:
    if isinstance(handler, FastckptRendezvousHandler) and handler.ending:
        return str(closed_error(handler.ending))
    return ELSEWHERE if _is_awaited(handler) else ""


def _is_awaited(handler: RendezvousHandler) -> bool:
    """Return whether nodes wait for the next round, because they failed or join; True if the store does not answer."""
    try:
        return handler.num_nodes_waiting() > 0
    except (RendezvousError, RuntimeError):  # the store has gone, with the node that has it
        return True
