"""The agent's side of one template: start it, wait for it with deadlines, have it fork, end it."""

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

from fastckpt.errors import FastckptError
from fastckpt_run.failures.tracebacks import tail_of
from fastckpt_run.preload.environment import current
from fastckpt_run.preload.fork_request import GO, READY, ForkRequest
from fastckpt_run.preload.fork_safety import working_directory
from fastckpt_run.preload.imports import ImportOutcome, ImportPlan
from fastckpt_run.preload.orphans import kill_forks, subreaper

logger = logging.getLogger("fastckpt.launcher")

_ANSWER = 10.0
_MESSAGE = 1 << 20
_START = """import sys
if not sys.flags.safe_path: del sys.path[0]
sys.path.append(sys.argv[1])
from fastckpt_run.preload import template
run, end = template.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
end(run())"""


class TemplateError(FastckptError):
    """A template cannot fork, or does not answer."""


class Template:
    """A process that imports the workers' modules and then forks them; it ends with this process at the latest.

    Attributes:
        started: Time of its start, on the monotonic clock.
        inherited: Values that it has inherited from this process.
        environment: Its environment.
        pid: Its pid.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """Start it; it imports the modules of all workers at once. ``environment`` is this process's by default."""
        self.started = time.monotonic()
        self.inherited = inheritance()
        self.environment = dict(current() if environment is None else environment)
        # Memory files, not pipes: imports may print any amount, and nobody reads meanwhile.
        self._output = [os.memfd_create("fastckpt-template", os.MFD_CLOEXEC) for _ in range(2)]
        # SEQPACKET keeps the boundaries of messages, and reports the template's death as end of file.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours = str(Path(__file__).parent.parent.parent)
        with closing(theirs):
            self._process = Popen(
                [sys.executable, "-u", "-c", _START, ours, str(theirs.fileno()), str(os.getpid())],
                stdin=DEVNULL,
                stdout=self._output[0],
                stderr=self._output[1],
                env=self.environment,
                pass_fds=[theirs.fileno()],
                # Ctrl-C must reach the agent alone, which ends the template.
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._outcome: ImportOutcome | None = None

    def follow(self, plan: ImportPlan) -> None:
        """Have it import the modules of a plan, too."""
        with suppress(OSError):  # it has died already, which the first wait will find
            self._socket.send(json.dumps(asdict(plan)).encode())

    @property
    def known(self) -> bool:
        """True if it has reported the outcome of its imports."""
        return self._outcome is not None

    def look(self) -> None:
        """Raise TemplateError if it has died."""
        if self._process.poll() is not None:
            raise TemplateError(f"the template ended: {self._last_words()}")

    def outcome(self, deadline: float) -> ImportOutcome | None:
        """The outcome of its imports; None if it is not known at ``deadline`` (time.monotonic)."""
        if self._outcome is None and (answer := self._answer(deadline)) is not None:
            self._outcome = ImportOutcome(**answer)
        return self._outcome

    def fork(self, order: ForkRequest, streams: Sequence[int]) -> tuple[int, int]:
        """Fork a worker, which becomes a child of this process, and let it go; ``streams`` are its descriptors 0-2.

        Returns its pid, and the memory file of its order and report, which is the caller's to close. Raises
        TemplateError if it did not work: then there is no such worker.
        """
        # The fork waits at the pipe until it is a child of this process. One that fails before that reads the end
        # of the pipe, or is killed as a holder of it, and has run nothing of the script.
        let, go = os.pipe()
        memory = order.write()
        try:
            with subreaper():
                try:
                    pid = self._forked([*streams, memory, let])
                except BaseException:
                    self.close()
                    kill_forks(self.pid, let)
                    raise
            os.write(go, GO)
        except BaseException:
            os.close(memory)
            raise
        finally:
            os.close(let)
            os.close(go)
        return pid, memory

    def _forked(self, descriptors: list[int]) -> int:
        try:
            socket.send_fds(self._socket, [READY], descriptors)
        except OSError as error:
            raise TemplateError(f"the template has gone: {error.strerror}") from error
        answer = self._answer(time.monotonic() + _ANSWER)
        if answer is None:
            raise TemplateError(f"the template did not answer in {_ANSWER:.0f} s")
        if "pid" not in answer:
            raise TemplateError(f"the template could not fork: {answer.get('error')}")
        pid = int(answer["pid"])
        # Raises unless the pid is a child of ours; WNOWAIT leaves its exit code to torch.
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError as error:
            raise TemplateError(f"the fork {pid} did not become a child of the agent") from error
        return pid

    def _answer(self, deadline: float) -> dict[str, Any] | None:
        """Receive its next message; None if there is none before the deadline. Raises TemplateError if it has ended."""
        self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
        try:
            text = self._socket.recv(_MESSAGE)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError:
            text = b""
        if not text:
            raise TemplateError(f"the template ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _last_words(self) -> str:
        with suppress(TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        lines = tail_of(f"/proc/self/fd/{self._output[1]}").strip().splitlines()
        return lines[-1] if lines else f"exit code {code}"

    def close(self) -> None:
        """Kill it, if it is alive, and reap it; idempotent."""
        # SIGKILL at once: it has no state to save.
        self._process.kill()
        with suppress(TimeoutExpired):  # the kernel may not let it go, while it reads from a dead file system
            self._process.wait(_ANSWER)
        self._socket.close()
        for descriptor in self._output:
            os.close(descriptor)
        self._output = []


def inheritance() -> tuple[object, ...]:
    """Attributes that an executed child would inherit now, and that a template inherited when it started."""
    status = Path("/proc/thread-self/status").read_text().splitlines()
    kept = ("Umask:", "Uid:", "Gid:", "Groups:", "SigBlk:", "CapEff:", "NoNewPrivs:", "Cpus_allowed:", "Mems_allowed:")
    lines = tuple(line for line in status if line.startswith(kept))
    return lines, Path("/proc/self/limits").read_text(), working_directory(), os.nice(0)
