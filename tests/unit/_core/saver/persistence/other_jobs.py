"""Jobs in processes of their own, which stop themselves where they are told to."""

import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator

import pytest

from fastckpt.errors import FastckptError


class Other:
    """A job in a process of its own, which stops itself where it is told to."""

    def __init__(self, act: Callable[[], object]) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                said: object = act()
            except FastckptError as error:
                said = f"{type(error).__name__}: {error}"
            except BaseException:
                said = traceback.format_exc()
            os.write(writer, json.dumps(said).encode())
            os._exit(0)
        os.close(writer)
        self._reader = reader

    def wait_until_stopped(self) -> None:
        assert os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])

    def go_on(self) -> object:
        """What it says at its end."""
        os.kill(self.pid, signal.SIGCONT)
        os.waitpid(self.pid, 0)
        with os.fdopen(self._reader) as pipe:
            return json.load(pipe)

    def end(self) -> None:
        """Kill it, unless it has ended."""
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[], object]], Other]]:
    """Have another job act, until it stops itself; those that are left are killed."""
    made: list[Other] = []

    def begin(act: Callable[[], object]) -> Other:
        made.append(Other(act))
        made[-1].wait_until_stopped()
        return made[-1]

    yield begin
    for other in made:
        other.end()
