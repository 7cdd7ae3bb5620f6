"""fastckpt-run in forks of one process that has imported torch: ``forks.py <modules>``; each line says what to launch.

Importing torch in each agent, template and worker is most of what a short job costs. Here the agent is a fork of this
process, and so is the template, from which its workers are forked as ever.
"""

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
from fastckpt_run.main import main
from fastckpt_run.preload import template, template_process
from fastckpt_run.preload.orphans import subreaper
from fastckpt_run.preload.preloader import ForkedWorker

HERE = str(Path(__file__).parent)
PAUSE = 0.01


def wait_to_be_a_template(agent: int, orders: socket.socket) -> None:
    """Become the template of this agent's workers once it starts one; the end of a worker ends it as well."""
    message, descriptors, _, _ = socket.recv_fds(orders, 1024, 3)
    if not message:
        os._exit(0)
    orders.close()
    sys.path[:] = [entry for entry in sys.path if entry != HERE]  # which an executed one would not have
    os.setsid()
    for number, descriptor in enumerate(descriptors[:2], start=1):
        os.dup2(descriptor, number)
    run, end = template.main(message.decode(), descriptors[2], agent)
    end(run())


def with_a_template() -> bool:
    """Have this process fork its template, which is here already; False in the workers of that template."""
    ours, theirs = socket.socketpair()
    agent = os.getpid()
    if (pid := os.fork()) == 0:
        ours.close()
        wait_to_be_a_template(agent, theirs)
        return False
    theirs.close()

    def start(arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
        [descriptor] = options["pass_fds"]
        socket.send_fds(ours, [arguments[4].encode()], [options["stdout"], options["stderr"], descriptor])
        ours.close()
        template_process.Popen = subprocess.Popen  # another one is executed
        return ForkedWorker(arguments, pid)

    template_process.Popen = start
    return True


def launch(arguments: list[str], environment: dict[str, str], output: str) -> None:
    """Run fastckpt-run in this process, a fork."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if with_a_template():
        main(arguments)


def children() -> Iterator[psutil.Process]:
    """Processes below this one, and not yet ended."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process


def await_end(pid: int, deadline: float) -> tuple[int | None, list[str]]:
    """The exit code of a launch, None if it has none by then; and what it left running, which is killed."""
    code: int | None = None
    while code is None and time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(PAUSE)
    end = time.monotonic() + (2.0 if code is not None else 0.0)
    while (left := list(children())) and time.monotonic() < end:
        time.sleep(PAUSE)  # the dying need a moment
    found = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            found.append(f"{process.pid} {process.name()}")
            process.kill()
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return code, found


def serve() -> bool:
    """Launch what each line says, one after the other; False in a process that has been launched."""
    for line in sys.stdin:
        told = json.loads(line)
        if (pid := os.fork()) == 0:
            launch(told["arguments"], told["environment"], told["output"])
            return False
        code, left = await_end(pid, time.monotonic() + told["seconds"])
        print(json.dumps({"code": code, "left": left}), flush=True)
    return True


class Server:
    """Such a process, as seen by a test."""

    def __init__(self, *modules: str, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def launch(
        self, arguments: list[str], environment: dict[str, str], output: Path, seconds: float
    ) -> tuple[int | None, list[str]]:
        """Run fastckpt-run; its exit code, None if it did not end in time, and processes that it left running."""
        assert self._process.stdin is not None and self._process.stdout is not None
        told = {"arguments": arguments, "environment": environment, "output": str(output), "seconds": seconds}
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["code"], answer["left"]

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()
    with subreaper():
        serve()
