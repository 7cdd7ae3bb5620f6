"""Chromium without a screen, driven by its DevTools protocol over a pipe: https://chromedevtools.github.io/devtools-protocol."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
DEADLINE = 60.0


class Browser:
    """One page in a browser that reaches this machine alone.

    Attributes:
        requests: The URLs of all requests that the page has made.
        errors: What its console has complained of, and exceptions in its scripts.
    """

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self._process, self._to, self._back = process, to, back
        self._number, self._rest, self._session = 0, b"", ""
        self._answers: dict[int, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = DEADLINE) -> Any:
        end = time.monotonic() + seconds
        while not (
            found := self.run(f"(() => {{ const found = {script}; return found instanceof Node || found; }})()")
        ):
            assert time.monotonic() < end, f"{script} did not become true; {self.run('document.body.innerText')}"
            time.sleep(0.05)
        return found

    def look(self, width: int, height: int = 900) -> None:
        """Have a window of this size, on a screen of a phone or a desk."""
        phone = {"width": width, "height": height, "deviceScaleFactor": 1.0, "mobile": width < 500}
        self._call("Emulation.setDeviceMetricsOverride", **phone)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + DEADLINE
        while self._number not in self._answers:
            assert select.select([self._back], [], [], max(0.0, end - time.monotonic()))[0], f"{method}: no answer"
            data = os.read(self._back, 1 << 16)
            assert data, f"the browser has ended: {self._process.poll()}"
            *messages, self._rest = (self._rest + data).split(b"\0")
            for one in messages:
                self._take(json.loads(one))
        answer = self._answers.pop(self._number)
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            return
        what = message.get("params", {})
        match message["method"]:
            case "Network.requestWillBeSent":
                self.requests.append(what["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(what["exceptionDetails"]))
            case "Log.entryAdded":
                self.errors.append(what["entry"]["text"])


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is in a folder; it looks up no names, and finds no proxy."""
    to, back = os.pipe(), os.pipe()
    arguments = [
        PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--no-proxy-server",
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", "--remote-debugging-pipe",
        f"--user-data-dir={folder / 'profile'}", f"--log-net-log={folder / 'net.json'}", "about:blank",
    ]  # fmt: skip
    # The browser reads from descriptor 3, and writes to 4.
    reads, writes = (fcntl.fcntl(each, fcntl.F_DUPFD, 64) for each in (to[0], back[1]))
    script = f'exec 3<&{reads} 4>&{writes}; exec "$@"'
    environment = {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
    with open(folder / "chromium.log", "wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", *arguments],
            pass_fds=(reads, writes),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    for each in (to[0], back[1], reads, writes):
        os.close(each)
    try:
        one = Browser(process, to[1], back[0])
        yield one
        one._session = ""
        one._call("Browser.close")
        process.wait(DEADLINE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
        os.close(to[1])
        os.close(back[0])


def connected(folder: Path) -> set[str]:
    """The addresses to which the browser has opened connections, by its log of the network."""
    log = json.loads((folder / "net.json").read_text())
    number = log["constants"]["logEventTypes"]["TCP_CONNECT_ATTEMPT"]
    attempts = [event.get("params", {}) for event in log["events"] if event["type"] == number]
    return {attempt["address"] for attempt in attempts if "address" in attempt}
