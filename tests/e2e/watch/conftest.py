"""Jobs that are watched while they run: agents that are forked, and what their pages answer."""

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import launchers

PROGRAM = Path(__file__).with_name("train.py")
DEADLINE = 120.0
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class WatchedAgent:
    """An agent of a job, with its pages; its program trains until there is a file ``stop``."""

    def __init__(self, folder: Path, name: str, *arguments: str, **environment: str) -> None:
        self.output = folder / f"output-{name}"
        memory = folder / f"memory-{name}"
        memory.mkdir(mode=0o700)
        own = {"TMPDIR": str(folder), "FASTCKPT_SHM_DIR": str(memory), "FASTCKPT_PRELOAD": "auto"}
        command = ["-m", "fastckpt_run", "--fast-metrics-port=0", "--max-restarts=3", *arguments, str(PROGRAM)]
        with self.output.open("ab") as output:
            self.process = launchers.start([*command, str(folder)], os.environ | own | environment, output.fileno())

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def address(self) -> re.Match[str]:
        """The URL of the page and its token, which the launcher has logged."""
        pattern = r"the live page of the job is (?P<url>http://[^/]+)/#token=(?P<token>\S+)"
        return self.until(lambda: re.search(pattern, self.text()), "the agent serves its page")

    @property
    def url(self) -> str:
        return self.address["url"]

    def ask(self, path: str, *, token: str | None = None) -> tuple[int, str]:
        headers = {} if token is None else {"X-Fastckpt-Token": token}
        method = "GET" if token is None else "POST"
        request = urllib.request.Request(self.url + path, method=method, headers=headers)
        try:
            with OPENER.open(request, timeout=DEADLINE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def until(self, condition: Callable[[], Any], what: str, pause: float = 0.05) -> Any:
        end = time.monotonic() + DEADLINE
        while not (found := condition()):
            assert time.monotonic() < end, f"{what}: this did not come true in {DEADLINE} s\n{self.text()}"
            assert self.process.poll() is None, f"{what}: the agent has ended\n{self.text()}"
            time.sleep(pause)
        return found

    def until_status(self, condition: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        def status() -> dict[str, Any] | None:
            code, text = self.ask("/status.json")
            assert code == 200, text
            document: dict[str, Any] = json.loads(text)
            return document if condition(document) else None

        found: dict[str, Any] = self.until(status, what)
        return found

    def ends(self) -> int:
        return self.process.wait(DEADLINE)


def workers(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [worker for node in status["nodes"] for worker in node.get("workers", ())]


def trains(status: dict[str, Any], restarts: int = 0) -> bool:
    found = workers(status)
    steps = all(worker["steps"] and worker.get("restarts") == restarts for worker in found)
    return status["job"]["state"] == "trains" and len(found) == 2 and steps


@pytest.fixture
def watch(tmp_path: Path, forked_launchers: None) -> Iterator[Callable[..., WatchedAgent]]:
    """Starts agents by their names, and cleans up after a test that failed."""
    agents: list[WatchedAgent] = []

    def start(*arguments: str, **environment: str) -> WatchedAgent:
        agents.append(WatchedAgent(tmp_path, *arguments, **environment))
        return agents[-1]

    yield start
    for agent in agents:
        if agent.process.poll() is None:
            os.killpg(agent.process.pid, signal.SIGKILL)
            agent.process.wait()
