"""Workers that die with their agent, and all at once when one of them fails."""

import json
import logging
import os
import signal
import threading
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import Popen
from typing import Any

import torch.distributed.run as torchrun
from torch import multiprocessing
from torch.distributed.elastic.multiprocessing import MultiprocessContext, RunProcsResult, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from fastckpt_run.failures.deaths import peek
from fastckpt_run.grace import ask_to_end, kill_group, wake
from fastckpt_run.parent_death import die_with
from fastckpt_run.preload.preloader import Preloader

logger = logging.getLogger("fastckpt.launcher")

_KILL_WAIT = 30.0


def kill_orphans(leader: int) -> None:
    """Kill what a reaped worker left in its process group.

    The kernel gives the number of a group that has members to no new process: if there is no process of
    that number, the group is still the worker's.
    """
    if not Path(f"/proc/{leader}").exists():
        kill_group(leader)


class BoundSubprocessHandler(SubprocessHandler):
    """Starts a worker that the kernel kills when its agent dies: forked from a template, or else executed."""

    def __init__(self, *args: Any, preloader: Preloader, **kwargs: Any) -> None:
        self._preloader = preloader
        super().__init__(*args, **kwargs)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Popen[bytes]:
        streams = [0, *(file.fileno() if file else n for n, file in enumerate((self._stdout, self._stderr), start=1))]
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
            start_new_session=True,
            preexec_fn=lambda: die_with(agent),  # noqa: PLW1509 (between fork and exec is the point)
        )


def run_script_path(training_script: str, *script_args: str) -> None:
    """torchrun's function of this name, in a session of its own as other workers have, bound to the agent."""
    os.setsid()
    if (agent := multiprocessing.parent_process()) is not None:
        if agent.pid == os.getppid():
            die_with(agent.pid)
        else:  # a fork server stands in between, and lives as long as its children
            threading.Thread(target=_die_after, args=(agent,), daemon=True).start()
    try:
        torchrun.run_script_path(training_script, *script_args)
    except SystemExit as end:
        if end.code is not None:  # sys.exit() without a code: torch would wait for its result without end
            raise


def _die_after(agent: BaseProcess) -> None:
    agent.join()
    os.kill(os.getpid(), signal.SIGKILL)


class ScriptWorkers(SubprocessContext):
    """Workers that run a command; those that a failure takes along are killed, after ``grace`` seconds if any."""

    def __init__(self, *args: Any, grace: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._grace = grace
        self.stopped: set[int] = set()

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """As torch's; without a signal, which is how torch stops the others after a failure, SIGKILL."""
        if death_sig is None:
            running = {r: h.proc.pid for r, h in self.subprocess_handlers.items() if h.proc.poll() is None}
            self.stopped |= running.keys()
            if self._grace:
                ask_to_end(running.values(), self._grace)
        for handler in self.subprocess_handlers.values():
            if death_sig is not None and handler.proc.poll() is None:
                wake(handler.proc.pid)
        super().close(death_sig or signal.SIGKILL, timeout)

    def _capture_process_failures(self, done_local_ranks: set[int]) -> None:
        for local_rank in self._running_local_ranks:
            worker = self.subprocess_handlers[local_rank].proc
            exitcode = peek(worker.pid) if worker.returncode is None else worker.returncode
            if exitcode and worker.returncode is None:
                kill_group(worker.pid)  # before torch reaps it and the number loses its meaning
            if exitcode:
                _drop_if_torn(Path(self.error_files[local_rank]))
        super()._capture_process_failures(done_local_ranks)


class FunctionWorkers(MultiprocessContext):
    """Workers that run a function, with the same manners."""

    def __init__(self, *args: Any, grace: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._grace = grace
        self.stopped: set[int] = set()

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """As torch's; without a signal SIGKILL."""
        running = [p.pid for p in self._pc.processes if p.is_alive()] if self._pc is not None else []
        if death_sig is None and self._grace:
            ask_to_end(running, self._grace)
        for pid in running if death_sig is not None else ():
            wake(pid)
        super().close(death_sig or signal.SIGKILL, timeout)

    def _poll(self) -> RunProcsResult | None:
        if self._pc is not None:
            failed = {rank for rank, process in enumerate(self._pc.processes) if peek(process.pid)}
            if failed:
                self._kill_all_but_tell(failed)
        return super()._poll()

    def _kill_all_but_tell(self, failed: set[int]) -> None:
        assert self._pc is not None
        others = [p.pid for rank, p in enumerate(self._pc.processes) if rank not in failed and p.is_alive()]
        if self._grace:
            ask_to_end(others, self._grace)
        for process in self._pc.processes:
            kill_group(process.pid)
            process.kill()  # one that has not come to its own session yet
        for rank in set(range(self.nprocs)) - failed:
            self._pc.processes[rank].join(_KILL_WAIT)
        # torch names the first dead that it finds: let it find those that failed.
        self._pc.sentinels = {fd: rank for fd, rank in self._pc.sentinels.items() if rank in failed}
        wait(list(self._pc.sentinels), _KILL_WAIT)  # it is open while a child of the failed one lives
        for rank in failed:
            _drop_if_torn(Path(self.error_files[rank]))


def _drop_if_torn(error_file: Path) -> None:
    """Remove the error file of a worker that was killed while it wrote it; torch would raise on it."""
    if not error_file.is_file():
        return
    try:
        json.loads(error_file.read_bytes())
    except ValueError:
        logger.warning("%s is incomplete: its worker was killed while it wrote it", error_file)
        error_file.unlink()
