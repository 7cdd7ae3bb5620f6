"""Progress of long work: in a terminal, and nowhere else; whatever becomes of the terminal, the work goes on."""

import os
import re
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt._core.byte_sizes import parsed
from fastckpt._core.inspect import archive, exported_file, verify
from fastckpt._core.io import direct
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt_run.cli import progress
from fastckpt_run.cli.progress import ProgressLine, TerminalOutput, WorkStage
from tests.cli.conftest import publish
from tests.cli.terminals import Terminal, screen

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


@pytest.fixture
def large(directory) -> Path:
    """Steps 1 and 2 on storage, of 20 MB each."""
    for step in (1, 2):
        publish(directory, step, state=STATE)
    return directory


def filled(arguments: list[str], run: Path) -> list[str]:
    (run.parent / "out").mkdir(exist_ok=True)
    return [part.format(run=run, out=run.parent / "out") for part in arguments]


class Slowed:
    """Has work take long, in the process that calls it: each piece of it waits until progress was drawn.

    Args:
        first: Seconds, at most, that the first piece waits; no other does if it has waited in vain.
        then: Seconds, at most, that the others wait each.
        holds: Whether the first piece that is written waits for a signal.
    """

    def __init__(self, *, first: float = 60.0, then: float = 10.0, holds: bool = False) -> None:
        self._patience, self._then, self._holds = first, then, holds

    def __call__(self) -> None:
        self._drawn, draw = threading.Event(), ProgressLine.draw

        def drawing(line: ProgressLine, stage: WorkStage) -> None:
            drawn = self._drawn  # of the piece that waits now: one that begins meanwhile is not in this drawing
            draw(line, stage)
            drawn.set()

        ProgressLine.draw = drawing
        progress.DELAY, progress.PERIOD = 0.1, 0.02
        verify.LOOKS = ()
        for place, name in (
            (direct, "read_some"),
            (archive.OpenFile, "read"),
            (exported_file.ExportedFile, "write"),
            (exported_file.ExportedFile, "sync"),
            (CheckpointDirectory, "delete"),
        ):
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
                self._patience = self._then if self._drawn.wait(self._patience) else 0.0
            return function(*arguments, **options)

        setattr(place, name, slow)


UNSEEN = Slowed(first=0.3)
"""Lasts as long as what is shown elsewhere, for what is not to be shown here."""


@pytest.mark.parametrize("deed", COMMANDS)
def test_long_work_shows_bytes_rate_and_time_left_and_leaves_the_answer_alone(large, deed):
    publish(large, 3, state=STATE) if deed == "delete" else None
    shown = Terminal(filled(COMMANDS[deed], large), Slowed()).finish()
    drawn = [line for line in shown.drawings if line.startswith(deed + " ")]
    assert shown.code == 0 and drawn, shown.raw
    assert any(re.search(r"━ .* of \d+\.\d MB  +\S+ \wB/s  +\d+ s left$", line) for line in shown.drawings)
    amounts = [parsed(re.search(r"([\d.]+ \w*B) of", line)[1]) for line in drawn]
    assert amounts == sorted(amounts) and len(set(amounts)) > 1
    # The line has gone without a trace: what stands there is what a pipe would get, and the cursor is below it.
    assert not any(re.search(r"B of \d|━", line) for line in shown.screen)
    assert shown.screen[-1] == "" and len(shown.screen) > 1


def without_errors() -> None:
    """Standard error is closed."""
    sys.stderr = None
    UNSEEN()


def unseen_in_pipes() -> None:
    """The outputs of a command are no terminals."""
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
        ("state.pt", lambda terminal: terminal.type(b"\x03"), signal.SIGINT),
        ("state.safetensors", lambda terminal: os.kill(terminal.pid, signal.SIGTERM), signal.SIGTERM),
        ("state.pt", Terminal.vanish, signal.SIGHUP),
    ],
    ids=["written", "terminated", "its terminal is closed"],
)
def test_an_export_that_is_ended_leaves_no_half_a_file_on_a_clean_terminal(large, name, act, number):
    command = filled(["export", "{run}@1", f"{{out}}/{name}", "--only", "model"], large)
    shown = Terminal(command, Slowed(then=1.0, holds=True)).finish(once("write", act))
    assert shown.code == 128 + number and list((large.parent / "out").iterdir()) == []
    if number == signal.SIGINT:
        [last, end] = shown.screen
        assert last.removeprefix("^C").strip() == "fastckpt: stopped" and end == ""


def outliving() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    Slowed(then=1.0)()


def test_work_goes_on_where_the_terminal_is_lost_or_takes_nothing(fastckpt, large):
    command = [*filled(COMMANDS["verify"], large), "--json"]
    answer = fastckpt(*command).out
    for setup, act in ((outliving, Terminal.vanish), (Slowed(then=1.0), lambda terminal: terminal.type(b"\x13"))):  # ^S
        shown = Terminal(command, setup, piped=True).finish(once("verify", act))
        assert (shown.code, shown.out) == (0, answer)


class Paper(TerminalOutput):
    """A terminal that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__(-1, "utf-8")
        self.width, self.text = 100, ""

    def columns(self) -> int:
        return self.width

    def is_ready(self) -> bool:
        return self.width > 0

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


def test_the_rate_is_that_of_the_last_seconds_and_time_is_left_by_it():
    now, paper, stage = [0.0], Paper(), WorkStage("verify", 100_000_000)
    line = ProgressLine(paper, lambda: now[0])

    def drawn(seconds: float, done: int) -> str:
        now[0] += seconds
        stage.done, paper.text = done, ""
        line.draw(stage)
        return screen(paper.text)[-1]

    assert "0 B of 100.0 MB  0 B/s" in drawn(0, 0) and "left" not in paper.text
    assert drawn(1, 10_000_000).endswith("10.0 MB of 100.0 MB  10.0 MB/s  9 s left")
    assert drawn(1, 30_000_000).endswith("30.0 MB of 100.0 MB  15.0 MB/s  5 s left")
    for _ in range(60):  # nothing comes any more
        text = drawn(1, 30_000_000)
    assert "30.0 MB of 100.0 MB  0 B/s" in text and "left" not in text
    stage = WorkStage("write", 5000)  # nothing of the stage before counts for it
    assert "0 B of 5.0 kB  0 B/s" in drawn(1, 0) and "5.0 kB of 5.0 kB" in drawn(1, 6000)  # never more than all
    for paper.width in (0, 1, 40):
        assert len(drawn(1, 3000)) <= max(0, paper.width - 3)
