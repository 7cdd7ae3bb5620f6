"""Commands in a real terminal: a child of this process, with a pseudo-terminal that controls it."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from fastckpt_run.cli import main

DEADLINE = 120.0
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Shown:
    """Outcome of a command: its exit code, all that the terminal got, and what went to a pipe as standard output."""

    code: int
    raw: str
    out: str

    @property
    def screen(self) -> list[str]:
        """The lines of the terminal at the end; the last one has the cursor."""
        return screen(self.raw)

    @property
    def drawings(self) -> list[str]:
        """Each state of the line of progress."""
        return [line.strip() for line in re.split(r"[\r\n]", _STYLE.sub("", self.raw)) if re.search(r"B of \d", line)]


def screen(raw: str) -> list[str]:
    """The lines of a wide terminal after all this has been written to it; anything but colours is an error."""
    lines, column = [""], 0
    for text in re.split(r"(\r|\n)", _STYLE.sub("", raw)):
        if text == "\n":
            lines, column = [*lines, ""], 0
        elif text == "\r":
            column = 0
        elif text:
            assert text.isprintable(), repr(text)
            lines[-1] = lines[-1][:column].ljust(column) + text + lines[-1][column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in lines]


class Terminal:
    """A terminal in which a command runs; ``act`` sees what was shown so far after each piece of it.

    Args:
        arguments: Of the command.
        setup: What the child does before; it is lost with it.
        piped: Whether standard output goes to a pipe, so that the terminal has standard error alone.
        environment: Variables.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        setup: Callable[[], None] = lambda: None,
        *,
        piped: bool = False,
        **environment: str,
    ) -> None:
        self._pipe, out = os.pipe()
        parent_reads, go = os.pipe()
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.close(go)
            os.read(parent_reads, 1)  # the terminal has its size
            if piped:
                os.dup2(out, 1)
            os.environ.update({"TERM": "xterm-256color", **environment})
            _run([str(argument) for argument in arguments], setup)
        os.close(out)
        os.close(parent_reads)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        os.close(go)

    def type(self, keys: bytes) -> None:
        """Press keys, such as Ctrl-C."""
        os.write(self.master, keys)

    def finish(self, act: Callable[["Terminal", str], Any] = lambda terminal, raw: None) -> Shown:
        """Wait for the end of the command."""
        raw, out = bytearray(), bytearray()
        is_open = {self.master: raw, self._pipe: out}
        end = time.monotonic() + DEADLINE
        while is_open:
            assert time.monotonic() < end, (raw, out)
            for descriptor in select.select(list(is_open), [], [], 0.1)[0]:
                data = _read(descriptor)
                is_open[descriptor].extend(data)
                if not data:
                    is_open.pop(descriptor)
                elif descriptor == self.master:
                    act(self, raw.decode())
            if self.master == -1:
                is_open = {self._pipe: out} if self._pipe in is_open else {}
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        for descriptor in {self._pipe, self.master} - {-1}:
            os.close(descriptor)
        return Shown(code, raw.decode().replace("\r\n", "\n"), out.decode())

    def vanish(self) -> None:
        """Close it, as when a window is closed or a connection is lost."""
        os.close(self.master)
        self.master = -1


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""  # nobody has the terminal open any more


def _run(arguments: list[str], setup: Callable[[], None]) -> NoReturn:
    """Run the command in the child: it has this process's modules, and none of its tests."""
    code = 99
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        setup()
        main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            try:
                stream.flush()
            except (OSError, ValueError):
                code = code or 98
        os._exit(code)
