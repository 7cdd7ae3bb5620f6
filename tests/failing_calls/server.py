"""Runs cases in forks of one process that has imported torch: requests and outcomes are lines of JSON."""

import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy.random  # noqa: F401 (as what follows, imported by each worker at its first save or load)
import torch
import torch.utils.serialization

from tests.failing_calls.case import PROCEDURES, Case
from tests.failing_calls.page import VARIABLE, Fault, Page, environment
from tests.support.forks import forked

LONGEST = 600.0
"""Seconds of a case, in which several answers may take as long as they may."""


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


def run(request: dict[str, Any], page: Page, to: Path) -> None:
    """One case, in this process; its outcome is in a file then."""
    torch.set_num_threads(1)
    fault = Fault(**request["fault"]) if request["fault"] else None
    case = Case(Path(request["folder"]), Path(request["shm"]), page, fault, request["place"])
    to.write_text(json.dumps(asdict(case.run(PROCEDURES[request["procedure"]]))))


def main() -> None:
    page = Page(os.environ[VARIABLE])
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        to = Path(request["folder"]).with_name("outcome")
        code = forked(partial(run, request, page, to), LONGEST)
        print(to.read_text() if code == 0 else json.dumps({"bad": [f"the case has ended with {code}"]}), flush=True)


if __name__ == "__main__":
    main()
