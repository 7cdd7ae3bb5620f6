"""Checks in a child process, each with a deadline: one that hangs is left behind with its process."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from types import TracebackType
from typing import Any, Self

from fastckpt._core.policy.node_check import CheckResult, Verdict
from fastckpt_run.failures.deaths import describe
from fastckpt_run.node_check.check_child import DEVICES, DIRECTORIES, DOCTOR, FAILURES, MESSAGE

_START = """import sys
if not sys.flags.safe_path: del sys.path[0]
sys.path.append(sys.argv[1])
from fastckpt_run.node_check.check_child import main
main(int(sys.argv[2]), int(sys.argv[3]))"""
_END = 2.0
"""Seconds that a killed process has to be gone; the kernel keeps one for longer that waits for a device."""


class CheckProcess:
    """Runs checks in a child process, which is replaced when one hangs or kills it; at the end none is left.

    Args:
        deadline: Seconds that a check may take.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._child: Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def run(self, request: Mapping[str, Any]) -> CheckResult:
        """Run a check.

        Args:
            request: Its arguments, among them its ``name``, and its kind as ``check``.
        """
        begin = time.monotonic()
        answer = self._ask(request)
        if isinstance(answer, CheckResult):
            return replace(answer, seconds=time.monotonic() - begin)
        return replace(CheckResult.from_record(answer), seconds=time.monotonic() - begin)

    def devices(self) -> list[str] | CheckResult:
        """The devices that torch sees; or why that is not known."""
        answer = self._ask({"check": DEVICES, "name": DEVICES})
        if isinstance(answer, list):
            return [str(each) for each in answer]
        return answer if isinstance(answer, CheckResult) else CheckResult.from_record(answer)

    def failures(self, directory: str, host: str) -> dict[str, int] | None:
        """Count the failures in the job of a directory: of a host (``own``), of all (``all``); None if not known.

        Asked here, since a directory may be on storage that hangs.
        """
        answer = self._ask({"check": FAILURES, "name": FAILURES, "directory": directory, "host": host})
        return answer if isinstance(answer, dict) and answer.keys() == {"own", "all"} else None

    def lines(self, check: str, **subject: Any) -> list[dict[str, Any]] | CheckResult:
        """The lines of a check of `fastckpt doctor`; or why there are none: it hangs, or has died."""
        answer = self._ask({"check": DOCTOR, "name": DOCTOR, "which": check, **subject})
        if isinstance(answer, list):
            return answer
        return answer if isinstance(answer, CheckResult) else CheckResult.from_record(answer)

    def directories(self, command: Sequence[str], shm_dir: str) -> list[tuple[str, str]] | CheckResult:
        """The checkpoint directories of a script as far as they are known, and how; or why that is not known."""
        request = {"check": DIRECTORIES, "name": DIRECTORIES, "command": [*command], "shm_dir": shm_dir}
        answer = self._ask(request)
        if isinstance(answer, list):
            return [(str(directory), str(how)) for directory, how in answer]
        return answer if isinstance(answer, CheckResult) else CheckResult.from_record(answer)

    def _ask(self, request: Mapping[str, Any]) -> Any:
        """The answer of the child; a result if it gave none."""
        name = str(request["name"])
        try:
            other = self._started()
            other.settimeout(self._deadline)
            other.send(json.dumps(request).encode())
            answer = other.recv(MESSAGE)
        except TimeoutError:
            text = f"not done after {self._deadline:g} s: it hangs"
            return CheckResult(name, Verdict.PROBLEM, text + ("" if self._end() else "; not even SIGKILL ends it"))
        except OSError as error:
            self._end()
            return CheckResult(name, Verdict.UNKNOWN, f"no process can be started: {error.strerror or error}")
        return json.loads(answer) if answer else self._died(name)

    def _died(self, name: str) -> CheckResult:
        child = self._child
        assert child is not None
        with suppress(TimeoutExpired):
            child.wait(_END)
        code = child.returncode
        self._end()
        # SIGKILL comes from outside: of the kernel, when there is no memory, or of another process.
        verdict = Verdict.PROBLEM if code is not None and code < 0 and code != -signal.SIGKILL else Verdict.UNKNOWN
        return CheckResult(name, verdict, f"its process died: {describe(code)}")

    def _started(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        # SEQPACKET keeps the boundaries of messages, and reports the child's death as end of file.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours = str(Path(__file__).parent.parent.parent)
        with closing(theirs):
            self._child = Popen(
                [sys.executable, "-c", _START, ours, str(theirs.fileno()), str(os.getpid())],
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=DEVNULL,
                pass_fds=[theirs.fileno()],
                # Ctrl-C must reach this process alone, which ends the child.
                start_new_session=True,
            )
        return self._socket

    def _end(self) -> bool:
        """Kill the child; False if the kernel does not let it go yet."""
        child, other, self._child, self._socket = self._child, self._socket, None, None
        if other is not None:
            other.close()
        if child is None:
            return True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            child.kill()  # before it is the leader of its session
        try:
            child.wait(_END)
        except TimeoutExpired:
            return False
        return True
