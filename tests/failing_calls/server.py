"""Runs cases in forks of one process that has imported torch: requests and outcomes are lines of JSON."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy.random  # noqa: F401 (as what follows, imported by each worker at its first save or load)
import torch
import torch.utils.serialization

from tests.failing_calls.case import Case
from tests.failing_calls.page import VARIABLE, Fault, Page, environment
from tests.failing_calls.procedures import PROCEDURES


class Server:
    """Such a process, as seen by a test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.failing_calls.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(folder),
        )

    def run(self, procedure: str, place: str, fault: Fault | None = None) -> dict[str, Any]:
        """Run a case: what came of it, as the fields of `Outcome`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"procedure": procedure, "place": place, "fault": fault and asdict(fault)}
        request |= {"folder": str(self._folder / "case"), "shm": f"{os.environ['FASTCKPT_SHM_DIR']}/case"}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)


def run(request: dict[str, Any], page: Page) -> dict[str, Any]:
    """One case, in this process."""
    torch.set_num_threads(1)
    fault = Fault(**request["fault"]) if request["fault"] else None
    case = Case(Path(request["folder"]), Path(request["shm"]), page, fault, request["place"])
    return asdict(case.run(PROCEDURES[request["procedure"]]))


def forked(request: dict[str, Any], page: Page) -> dict[str, Any]:
    """One case in a fork, of which nothing is left."""
    answers, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        os.setsid()
        try:
            outcome = run(request, page)
        except BaseException:
            outcome = {"bad": [f"the case itself: {traceback.format_exc()}"]}
        os.write(theirs, json.dumps(outcome).encode())
        os._exit(0)
    os.close(theirs)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with open(answers, "rb") as stream:
        return dict(json.loads(stream.read() or b'{"bad": ["the case has died"]}'))


def main() -> None:
    page = Page(os.environ[VARIABLE])
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(forked(json.loads(line), page)), flush=True)


if __name__ == "__main__":
    main()
