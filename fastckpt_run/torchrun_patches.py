"""All private names of torch's launcher that ours uses: a release that changes them breaks this file alone."""

import os
import signal
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from subprocess import Popen
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import MultiprocessContext, PContext, RunProcsResult, SubprocessContext
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    dynamic_rendezvous,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

from fastckpt_run.failures.deaths import peek
from fastckpt_run.left_processes import kill_group
from fastckpt_run.parent_death import die_with
from fastckpt_run.preload.preloader import Preloader
from fastckpt_run.workers import continue_group, drop_if_torn, terminate_gracefully

_KILL_WAIT = 30.0
_POLL = 0.02
"""Seconds between two looks for the other nodes, at least."""
_POLL_SHARE = 0.02
"""The same as a share of the time that a node has waited."""
SIGNAL_HANDLER: Any = _terminate_process_handler
"""The handler that raises a SignalException in the agent, wherever it is."""

# --- the agent


class HookedAgent(LocalElasticAgent):
    """torch's agent with a public hook in place of each private method that it calls; `proceed` is torch's own."""

    @property
    def context(self) -> PContext | None:
        """The running workers; None before they are started."""
        return self._pcontext

    @property
    def restarts_left(self) -> int:
        """The number of restarts that torch would still make."""
        return int(self._remaining_restarts)

    @restarts_left.setter
    def restarts_left(self, number: int) -> None:
        self._remaining_restarts = number

    @property
    def uninterruptible(self) -> list[int]:
        """The pids of workers that the kernel does not let run, and has not for long."""
        return list(self._uninterruptible_state_first_seen)

    @abstractmethod
    def meet(self, proceed: Callable[[], None]) -> None:
        """Meet the other nodes."""

    @abstractmethod
    def worker_environment(self, local_rank: int) -> Mapping[str, str]:
        """Variables that a worker gets besides torch's."""

    @abstractmethod
    def start_workers(self, proceed: Callable[[], dict[int, Any]]) -> dict[int, Any]:
        """Start the workers of this node; returns their pids by local rank."""

    @abstractmethod
    def monitor(self, proceed: Callable[[], RunResult]) -> RunResult:
        """Look how the workers are; torch calls this again and again."""

    @abstractmethod
    def restart_workers(self, proceed: Callable[[], None]) -> None:
        """Stop the workers, and start them again."""

    @abstractmethod
    def stop_workers(self, proceed: Callable[[], None]) -> None:
        """Stop the workers because one failed, or another node waits."""

    @abstractmethod
    def shut_down(self, proceed: Callable[[], None], *, signalled: bool) -> None:
        """End the workers at the end of the job, which may come by a signal."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.meet(partial(super()._rendezvous, worker_group))

    def _set_local_rank_env(self, worker_env: dict[str, str | None], local_rank: int, spec: WorkerSpec) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        worker_env |= self.worker_environment(local_rank)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self.start_workers(partial(super()._start_workers, worker_group))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor(partial(super()._monitor_workers, worker_group))

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.restart_workers(partial(super()._restart_workers, worker_group))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.stop_workers(partial(super()._stop_workers, worker_group))

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self.shut_down(partial(super()._shutdown, *args, **kwargs), signalled=bool(args))


# --- workers


class BoundSubprocessHandler(SubprocessHandler):
    """Starts a worker that the kernel kills when its agent dies: forked from a template, or else executed."""

    def __init__(self, *args: Any, preloader: Preloader, **kwargs: Any) -> None:
        self._preloader = preloader
        super().__init__(*args, **kwargs)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Popen[bytes]:
        streams = [0, *(file.fileno() if file else n for n, file in enumerate((self._stdout, self._stderr), start=1))]
        # The fallback is always there: whatever keeps the template from forking costs time, never the start.
        worker = self._preloader.fork(args, env, streams) or self._execute(args, env)
        self._preloader.started(worker.pid)
        return worker

    def _execute(self, args: tuple[str, ...], env: dict[str, str]) -> Popen[bytes]:
        agent = os.getpid()
        return Popen(
            args,
            env=env,
            stdout=self._stdout,
            stderr=self._stderr,
            # A session of its own, with a process group in which its children are; and Ctrl-C reaches only the agent.
            start_new_session=True,
            preexec_fn=lambda: die_with(agent),  # noqa: PLW1509 (between fork and exec is the point)
        )

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Same as torch's; SIGKILL is for the worker alone, as `LeftProcesses` ends its descendants."""
        if death_sig != signal.SIGKILL:
            super().close(death_sig)
            return
        self.proc.kill()
        for stream in filter(None, (self._stdout, self._stderr)):
            stream.close()


class ScriptWorkers(SubprocessContext):
    """Workers that run a command; those that a failure takes along are killed, after ``grace`` seconds if any."""

    def __init__(self, *args: Any, grace: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._grace = grace
        self.stopped: set[int] = set()

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """Same as torch's; without a signal (torch's way to stop the others after a failure), send SIGKILL."""
        if death_sig is None:
            # Stopped workers did not fail: causes and restarts must be judged without them.
            running = {r: h.proc.pid for r, h in self.subprocess_handlers.items() if h.proc.poll() is None}
            self.stopped |= running.keys()
            if self._grace:
                terminate_gracefully(running.values(), self._grace)
        for handler in self.subprocess_handlers.values():
            if death_sig is not None and handler.proc.poll() is None:
                continue_group(handler.proc.pid)
        super().close(death_sig or signal.SIGKILL, timeout)

    def _capture_process_failures(self, done_local_ranks: set[int]) -> None:
        for local_rank in self._running_local_ranks:
            worker = self.subprocess_handlers[local_rank].proc
            # torch's poll would reap: as long as the worker is a zombie,
            # its pid and group can be given to no other process.
            exitcode = peek(worker.pid) if worker.returncode is None else worker.returncode
            if exitcode:
                drop_if_torn(Path(self.error_files[local_rank]))
        super()._capture_process_failures(done_local_ranks)


class FunctionWorkers(MultiprocessContext):
    """Workers that run a function, which end in the same way."""

    def __init__(self, *args: Any, grace: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._grace = grace
        self.stopped: set[int] = set()

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """Same as torch's; without a signal, send SIGKILL."""
        running = [p.pid for p in self._pc.processes if p.is_alive()] if self._pc is not None else []
        if death_sig is None and self._grace:
            terminate_gracefully(running, self._grace)
        for pid in running if death_sig is not None else ():
            continue_group(pid)
        super().close(death_sig or signal.SIGKILL, timeout)

    def _poll(self) -> RunProcsResult | None:
        if self._pc is not None:
            failed = {rank for rank, process in enumerate(self._pc.processes) if peek(process.pid)}
            if failed:
                self._kill_others(failed)
        return super()._poll()

    def _kill_others(self, failed: set[int]) -> None:
        assert self._pc is not None
        others = [p.pid for rank, p in enumerate(self._pc.processes) if rank not in failed and p.is_alive()]
        if self._grace:
            terminate_gracefully(others, self._grace)
        for process in self._pc.processes:
            kill_group(process.pid)
            process.kill()  # one that has not come to its own session yet
        for rank in set(range(self.nprocs)) - failed:
            self._pc.processes[rank].join(_KILL_WAIT)
        # torch names the first dead worker that it finds: let it find failed ones.
        self._pc.sentinels = {fd: rank for fd, rank in self._pc.sentinels.items() if rank in failed}
        wait(list(self._pc.sentinels), _KILL_WAIT)  # it is open while a child of the failed one lives
        for rank in failed:
            drop_if_torn(Path(self.error_files[rank]))


def is_shown(workers: PContext, local_rank: int) -> bool:
    """Return whether a worker's stderr has been shown; tracebacks of functions go to error files only."""
    teed = any(local_rank in tail._log_files for tail in workers._tail_logs[1:2])
    return not isinstance(workers, MultiprocessContext) and (teed or not workers.stderrs[local_rank])


# --- rendezvous


def forget_last_round(handler: RendezvousHandler) -> None:
    """Forget the store in which the workers of the last round met; call when they are dead.

    Else the next workers read there the addresses of their dead predecessors and fail to connect, which
    costs an attempt. A c10d handler is made to open a fresh store, on a fresh port. A static one shares its
    store, on the port that the user named, with the workers: that is emptied. With several nodes the static
    store is left alone, because another node's agent may be in its next round already.
    """
    if isinstance(handler, DynamicRendezvousHandler):
        # torch's rendezvous keeps the TCPStore of the first round and would hand it to the next one.
        handler._bootstrap_store_info = None
        handler._shared_tcp_store_server = None
    elif isinstance(handler, StaticTCPRendezvous) and handler.world_size == 1 and handler._store is not None:
        for key in handler._store.list_keys():
            handler._store.delete_key(key)


@contextmanager
def registered(create: Callable[[RendezvousParameters], RendezvousHandler]) -> Iterator[None]:
    """Register the handlers of ``create`` as the backend c10d, and torch's own as c10d-torch, while this lasts."""
    backends = rendezvous_handler_registry._registry
    torchs = backends["c10d"]

    def create_torchs(parameters: RendezvousParameters) -> RendezvousHandler:
        handler = torchs(parameters)
        handler._backend_name = parameters.backend  # type: ignore[attr-defined]
        return handler

    def create_c10d(parameters: RendezvousParameters) -> RendezvousHandler:
        # A store in a file is torch's: it cannot be waited for without polls.
        in_file = str(parameters.get("store_type", "tcp")).strip().lower() != "tcp"
        return torchs(parameters) if in_file else create(parameters)

    backends |= {"c10d": create_c10d, "c10d-torch": create_torchs}
    try:
        yield
    finally:
        backends["c10d"] = torchs
        del backends["c10d-torch"]


def is_registered(backend: str) -> bool:
    """Return whether there is a rendezvous of this name."""
    return backend in rendezvous_handler_registry._registry


def is_this_host(name: str) -> bool:
    """Return whether a name or an address is this host's."""
    return bool(_matches_machine_hostname(name))


@contextmanager
def without_waits(handler: RendezvousHandler) -> Iterator[None]:
    """Have nodes look for each other often, and names for torch's records found cheaply, while this lasts.

    torch has a node look once a second for the others, and keeps the result for a second, also between rounds. It waits
    up to 0.3 s at first, so that not all come at once: one node alone waits for nobody. And it looks up the source
    lines of the whole stack to find the name of one function, 8 times in each rendezvous, 8 ms each time.
    """
    torchs: Any = dynamic_rendezvous
    delay, name = torchs._delay, torchs.get_method_name
    alone = isinstance(handler, DynamicRendezvousHandler) and handler.settings.max_nodes == 1
    begin = time.monotonic()
    if isinstance(handler, DynamicRendezvousHandler):
        handler._state_holder._cache_duration = _POLL  # type: ignore[attr-defined]

    def delay_less(seconds: float | tuple[float, float]) -> None:
        if not isinstance(seconds, tuple):
            # A spare node may wait for days: its looks become as rare as torch's.
            delay(min(seconds, max(_POLL, (time.monotonic() - begin) * _POLL_SHARE)))
        elif not alone:
            delay(seconds)

    torchs._delay, torchs.get_method_name = delay_less, _name_of_caller
    try:
        yield
    finally:
        torchs._delay, torchs.get_method_name = delay, name


def stop_heartbeats(handler: RendezvousHandler, timeout: float) -> bool:
    """Stop heartbeats, which torch continues after a signal; False if they do not end in ``timeout`` seconds.

    A heartbeat is in C++ most of the time, and perhaps waits there for a store that is gone. A thread that comes back
    from there while Python ends has its stack unwound, which aborts the process.
    """
    if not isinstance(handler, DynamicRendezvousHandler):
        return True
    stopper = threading.Thread(target=handler._stop_heartbeats, name="fastckpt-heartbeats", daemon=True)
    stopper.start()
    stopper.join(timeout)
    return not stopper.is_alive()


def _name_of_caller(depth: int = 2) -> str:
    return sys._getframe(depth).f_code.co_name
