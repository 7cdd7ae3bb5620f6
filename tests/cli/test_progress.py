"""Progress of long work: in a terminal, and nowhere else; whatever becomes of the terminal, the work goes on."""

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from fastckpt._core.byte_sizes import parsed
from fastckpt._core.inspect import archive, exported_file, verify
from fastckpt._core.io import direct
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt_run.cli import main, progress
from fastckpt_run.cli.progress import ProgressLine, TerminalOutput, WorkStage
from tests.cli.conftest import publish

DEADLINE = 120.0
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Shown:
    """Outcome of a command: its exit code, all that the terminal got, and what went to a pipe as standard output."""

    code: int
    raw: str
    out: str

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
        self._open = {self.master, self._pipe}

    def finish(self, act: Callable[["Terminal", str], Any] = lambda terminal, raw: None) -> Shown:
        said = {self.master: bytearray(), self._pipe: bytearray()}
        end = time.monotonic() + DEADLINE
        while self._open:
            assert time.monotonic() < end, said
            for descriptor in select.select([*self._open], [], [], 0.1)[0]:
                said[descriptor].extend(data := _read(descriptor))
                if not data:
                    self._close(descriptor)
                elif descriptor == self.master:
                    act(self, said[self.master].decode())
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return Shown(code, said[self.master].decode().replace("\r\n", "\n"), said[self._pipe].decode())

    def vanish(self) -> None:
        """Close it, as when a window is closed or a connection is lost."""
        self._close(self.master)

    def _close(self, descriptor: int) -> None:
        os.close(descriptor)
        self._open.remove(descriptor)


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


# --- long work

STATE = {"model": {"a": torch.zeros(2_000_000), "b": torch.ones(2_000_000), "c": torch.ones(1_000_000)}}
"""20 MB, which are read in ten pieces."""
COMMANDS = {
    "verify": ["verify", "{run}", "--all"],
    "verify step 2": ["which", "{run}", "--verify"],
    "compare": ["diff", "{run}@1", "{run}@2", "--file", "model.pt"],
    "write": ["export", "{run}@1", "{out}/state.pt", "--only", "model"],
    "delete": ["prune", "{run}", "--keep-last", "1", "--yes"],
}
"""Arguments, by the deed that is shown."""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """Steps 1 and 2 on storage, of 20 MB each."""
    directory = tmp_path_factory.mktemp("large") / "run"
    for step in (1, 2):
        publish(directory, step, state=STATE)
    return directory


def filled(arguments: list[str], run: Path, out: Path | None = None) -> list[str]:
    return [part.format(run=run, out=out) for part in arguments]


class Slowed:
    """Has work take long, in the process that calls it: each piece waits until progress was drawn, or one in vain.

    The first piece that is written waits for a signal if it ``holds``.
    """

    def __init__(self, patience: float = 10.0, *, holds: bool = False) -> None:
        self._patience, self._holds = patience, holds

    def __call__(self) -> None:
        self._drawn, draw = threading.Event(), ProgressLine.draw

        def drawing(line: ProgressLine, stage: WorkStage) -> None:
            drawn = self._drawn  # of the piece that waits now: one that begins meanwhile is not in this drawing
            draw(line, stage)
            drawn.set()

        ProgressLine.draw = drawing
        progress.DELAY, progress.PERIOD = 0.1, 0.02
        verify.LOOKS = ()
        places = {direct: ["read_some"], archive.OpenFile: ["read"], CheckpointDirectory: ["delete"]}
        for place, names in {**places, exported_file.ExportedFile: ["write", "sync"]}.items():
            for name in names:
                self._slow(place, name)

    def _slow(self, place: Any, name: str) -> None:
        function, seen = getattr(place, name), [0]

        def slow(*arguments: Any, **options: Any) -> Any:
            seen[0] += 1
            if self._holds and name == "write" and seen[0] == 1:
                # In short ones: a signal that comes just before a sleep does not end it.
                for _ in range(1000):
                    time.sleep(0.1)
            elif seen[0] < 12 and self._patience:
                self._drawn = threading.Event()
                self._patience *= self._drawn.wait(self._patience)
            return function(*arguments, **options)

        setattr(place, name, slow)


UNSEEN = Slowed(0.3)
"""Lasts as long as what is shown elsewhere, for what is not to be shown here."""


@pytest.mark.parametrize("deed", COMMANDS)
def test_long_work_shows_bytes_rate_and_time_left_and_leaves_the_answer_alone(large, tmp_path, deed):
    run = large
    if deed == "delete":
        publish(run := shutil.copytree(large, tmp_path / "run"), 3, state=STATE)
    shown = Terminal(filled(COMMANDS[deed], run, tmp_path), Slowed()).finish()
    drawn = [line for line in shown.drawings if line.startswith(deed + " ")]
    assert shown.code == 0 and drawn, shown.raw
    assert any(re.search(r"━ .* of \d+\.\d MB  +\S+ \wB/s  +\d+ s left$", line) for line in shown.drawings)
    amounts = [parsed(re.search(r"([\d.]+ \w*B) of", line)[1]) for line in drawn]
    assert amounts == sorted(amounts) and len(set(amounts)) > 1
    # The line has gone without a trace: what stands there is what a pipe would get, and the cursor is below it.
    left = screen(shown.raw)
    assert not any(re.search(r"B of \d|━", line) for line in left)
    assert left[-1] == "" and len(left) > 1


def without_errors() -> None:
    sys.stderr = None
    UNSEEN()


def unseen_in_pipes() -> None:
    os.dup2(1, 2)
    UNSEEN()


def in_the_background() -> None:
    mode = termios.tcgetattr(0)
    mode[3] |= termios.TOSTOP  # who writes to it in the background is stopped
    termios.tcsetattr(0, termios.TCSANOW, mode)
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os.setpgid(0, 0)
    UNSEEN()


@pytest.mark.parametrize(
    ("options", "setup", "environment"),
    [
        (["--json"], unseen_in_pipes, {}),
        (["--quiet"], UNSEEN, {}),
        ([], without_errors, {}),
        ([], lambda: None, {}),
        ([], UNSEEN, {"TERM": "dumb"}),
        (["--json"], in_the_background, {}),
    ],
    ids=["a pipe", "quiet", "no standard error", "short work", "a dumb terminal", "the terminal is another job's"],
)
def test_nothing_but_long_work_in_a_terminal_shows_progress(fastckpt, large, options, setup, environment):
    command = [*filled(COMMANDS["verify"], large), *options]
    shown = Terminal(command, setup, piped=True, **environment).finish()
    assert (shown.code, shown.raw, shown.out) == (0, "", fastckpt(*command).out)


def once(deed: str, act: Callable[[Terminal], object]) -> Callable[[Terminal, str], None]:
    """Does something to a terminal as soon as it shows progress of a deed."""
    pending = [act]
    return lambda terminal, raw: pending.pop()(terminal) if pending and re.search(rf"{deed} .*B of \d", raw) else None


@pytest.mark.parametrize(
    ("name", "act", "number"),
    [
        ("state.pt", lambda terminal: os.write(terminal.master, b"\x03"), signal.SIGINT),
        ("state.safetensors", lambda terminal: os.kill(terminal.pid, signal.SIGTERM), signal.SIGTERM),
        ("state.pt", Terminal.vanish, signal.SIGHUP),
    ],
    ids=["written", "terminated", "its terminal is closed"],
)
def test_an_export_that_is_ended_leaves_no_half_a_file_on_a_clean_terminal(large, tmp_path, name, act, number):
    command = ["export", f"{large}@1", str(tmp_path / name), "--only", "model"]
    shown = Terminal(command, Slowed(5.0, holds=True)).finish(once("write", act))
    assert shown.code == 128 + number and list(tmp_path.iterdir()) == []
    if number == signal.SIGINT:
        [last, end] = screen(shown.raw)
        assert last.removeprefix("^C").strip() == "fastckpt: stopped" and end == ""


def outliving() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    Slowed(5.0)()


def test_work_goes_on_where_the_terminal_is_lost_or_takes_nothing(fastckpt, large):
    command = [*filled(COMMANDS["verify"], large), "--json"]
    answer = fastckpt(*command).out
    stops = b"\x13"  # ^S
    for setup, act in ((outliving, Terminal.vanish), (Slowed(5.0), lambda terminal: os.write(terminal.master, stops))):
        shown = Terminal(command, setup, piped=True).finish(once("verify", act))
        assert (shown.code, shown.out) == (0, answer)


def test_the_rate_is_that_of_the_last_seconds_and_time_is_left_by_it():
    (terminal, end), now, stage = pty.openpty(), [0.0], WorkStage("verify", 100_000_000)
    line = ProgressLine(TerminalOutput(end, "utf-8"), lambda: now[0])

    def drawn(seconds: float, done: int, columns: int = 100) -> str:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        now[0], stage.done = now[0] + seconds, done
        line.draw(stage)
        return screen(os.read(terminal, 65536).decode())[-1]

    assert drawn(0, 0).endswith("0 B of 100.0 MB  0 B/s")
    assert drawn(1, 10_000_000).endswith("10.0 MB of 100.0 MB  10.0 MB/s  9 s left")
    assert drawn(1, 30_000_000).endswith("30.0 MB of 100.0 MB  15.0 MB/s  5 s left")
    for _ in range(60):  # nothing comes any more
        text = drawn(1, 30_000_000)
    assert text.endswith("30.0 MB of 100.0 MB  0 B/s")
    stage = WorkStage("write", 5000)  # nothing of the stage before counts for it
    assert "0 B of 5.0 kB  0 B/s" in drawn(1, 0) and "5.0 kB of 5.0 kB" in drawn(1, 6000)  # never more than all
    assert len(drawn(1, 3000, 40)) <= 37
    os.close(end)
    os.close(terminal)
