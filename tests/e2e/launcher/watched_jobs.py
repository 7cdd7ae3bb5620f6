"""Jobs whose live page is asked while they run: agents that are forked, and what their pages answer."""

import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.launcher.conftest import program
from tests.support import launchers

DEADLINE = 120.0
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class WatchedAgent:
    """An agent of a job, with its page."""

    def __init__(self, folder: Path, name: str, *arguments: str, **environment: str) -> None:
        self.output = folder / f"output-{name}"
        memory = folder / f"memory-{name}"
        memory.mkdir(mode=0o700)
        own = {"JOB_FOLDER": str(folder), "TMPDIR": str(folder), "FASTCKPT_SHM_DIR": str(memory)}
        command = ["-m", "fastckpt_run", "--fast-metrics-port", "0", *arguments, program("watched.py")]
        with self.output.open("ab") as output:
            variables = os.environ | own | {"FASTCKPT_PRELOAD": "auto"} | environment
            self.process = launchers.start(command, variables, output.fileno())

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def address(self) -> re.Match[str]:
        """What the launcher has logged: the URL of the page, and its token."""
        pattern = r"the live page of the job is (?P<url>http://[^/]+)/#token=(?P<token>\S+)"
        return self.until(lambda: re.search(pattern, self.text()), "the agent serves its page")

    @property
    def url(self) -> str:
        return self.address["url"]

    def ask(self, path: str, *, token: str | None = None, **headers: str) -> tuple[int, str]:
        """The status and the text of an answer; with a token, of an action."""
        given = {} if token is None else {"X-Fastckpt-Token": token}
        method = "GET" if token is None else "POST"
        request = urllib.request.Request(self.url + path, method=method, headers={**given, **headers})
        try:
            with OPENER.open(request, timeout=DEADLINE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def status(self) -> dict[str, Any]:
        code, text = self.ask("/status.json")
        assert code == 200, text
        document: dict[str, Any] = json.loads(text)
        return document

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until a condition holds, and return what it is then."""
        end = time.monotonic() + DEADLINE
        while not (found := condition()):
            assert time.monotonic() < end, f"{what}: this did not come true in {DEADLINE} s\n{self.text()}"
            assert self.process.poll() is None, f"{what}: the agent has ended\n{self.text()}"
            time.sleep(0.05)
        return found

    def until_status(self, condition: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        """Wait until the state of the job is one, and return it."""
        found: dict[str, Any] = self.until(lambda: (now := self.status()) and condition(now) and now, what)
        return found

    def end(self) -> None:
        """Clean up after a test that failed."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def workers(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [worker for node in status["nodes"] for worker in node.get("workers", ())]


def trains(status: dict[str, Any], restarts: int = 0) -> bool:
    """Whether both workers take steps that were restarted so often."""
    found = workers(status)
    return (
        status["job"]["state"] == "trains"
        and len(found) == 2
        and all(worker["steps"] and worker.get("restarts") == restarts for worker in found)
    )


def ended(process: "subprocess.Popen[bytes]") -> int:
    return process.wait(DEADLINE)
