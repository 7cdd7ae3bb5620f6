"""Progress of long work: in a terminal, and nowhere else; whatever becomes of the terminal, the work goes on."""

import os
import re
import signal
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
from fastckpt._core.inspect.checkpoint_files import find
from fastckpt._core.inspect.diff import diff_all
from fastckpt._core.inspect.export import ExportOrder, export_file
from fastckpt._core.inspect.inventory import take
from fastckpt._core.io import direct
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt_run.cli import progress
from fastckpt_run.cli.progress import ProgressLine, TerminalOutput, WorkStage
from tests.cli.conftest import publish
from tests.cli.terminals import Shown, Terminal, screen

STATE = {"model": {"a": torch.zeros(2_000_000), "b": torch.ones(2_000_000), "c": torch.ones(1_000_000)}}
"""20 MB, which are read in ten pieces."""


@pytest.fixture
def large(directory) -> Path:
    """Steps 1 and 2 on storage, of 20 MB each."""
    for step in (1, 2):
        publish(directory, step, state=STATE)
    return directory


class Slowed:
    """Has work take long, in the process that calls it: each piece of it waits until progress was drawn.

    Args:
        held: The deed whose piece waits for a signal.
        first: Seconds, at most, that the first piece waits; no other does if it has waited in vain.
        then: Seconds, at most, that the others wait each.
    """

    def __init__(self, held: str = "", *, first: float = 60.0, then: float = 10.0) -> None:
        self._held, self._patience, self._then = held, first, then

    def __call__(self) -> None:
        self._drawn, draw = threading.Event(), ProgressLine.draw

        def drawing(line: ProgressLine, stage: WorkStage) -> None:
            drawn = self._drawn  # of the piece that waits now: one that begins meanwhile is not in this drawing
            draw(line, stage)
            drawn.set()

        ProgressLine.draw = drawing
        progress.DELAY, progress.PERIOD = 0.1, 0.02
        verify.LOOKS = ()
        self._slow(direct, "read_some", "verify")
        self._slow(archive.OpenFile, "read", "compare")
        self._slow(exported_file.ExportedFile, "write", "write")
        self._slow(exported_file.ExportedFile, "sync", "write")
        self._slow(CheckpointDirectory, "delete", "delete")

    def _slow(self, place: Any, name: str, deed: str) -> None:
        function, seen = getattr(place, name), [0]

        def slow(*arguments: Any, **options: Any) -> Any:
            seen[0] += 1
            if self._held == deed and seen[0] == 1:
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
VERIFY = ("verify", ["verify", "{run}", "--all"])
EXPORT = ("write", ["export", "{run}@1", "{out}/state.pt", "--only", "model"])
SAFETENSORS = ("write", ["export", "{run}@1", "{out}/state.safetensors"])
PRUNE = ("delete", ["prune", "{run}", "--keep-last", "1", "--yes"])
COMMANDS = [
    VERIFY,
    ("verify step 2", ["which", "{run}", "--verify"]),
    ("compare", ["diff", "{run}@1", "{run}@2", "--file", "model.pt"]),
    EXPORT,
    SAFETENSORS,
    PRUNE,
]
"""The deed that is shown, and the arguments."""


def filled(arguments: list[str], run: Path) -> list[str]:
    (run.parent / "out").mkdir(exist_ok=True)
    return [part.format(run=run, out=run.parent / "out") for part in arguments]


def amounts(drawings: list[str]) -> list[int]:
    return [parsed(re.search(r"([\d.]+ \w*B) of", line)[1]) for line in drawings]


@pytest.mark.parametrize(("deed", "arguments"), COMMANDS, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_long_work_shows_bytes_rate_and_time_left_and_leaves_the_answer_alone(large, deed, arguments):
    publish(large, 3, state=STATE) if deed == "delete" else None
    shown = Terminal(filled(arguments, large), Slowed()).finish()
    drawn = [line for line in shown.drawings if line.startswith(deed + " ")]
    assert shown.code == 0 and drawn, shown.raw
    assert any(re.search(r"━ .* of \d+\.\d MB  +\S+ \wB/s  +\d+ s left$", line) for line in shown.drawings)
    assert amounts(drawn) == sorted(amounts(drawn)) and len(set(amounts(drawn))) > 1
    # The line has gone without a trace: what stands there is what a pipe would get, and the cursor is below it.
    assert not any(re.search(r"B of \d|━", line) for line in shown.screen)
    assert shown.screen[-1] == "" and len(shown.screen) > 1


def unseen_in_pipes() -> None:
    """The outputs of a command are no terminals."""
    os.dup2(1, 2)
    UNSEEN()


@pytest.mark.parametrize(
    ("options", "setup", "environment"),
    [
        (["--json"], unseen_in_pipes, {}),
        (["--quiet"], UNSEEN, {}),
        ([], lambda: None, {}),
        ([], UNSEEN, {"TERM": "dumb"}),
    ],
    ids=["a pipe", "quiet", "short work", "a dumb terminal"],
)
def test_nothing_but_long_work_in_a_terminal_shows_progress(fastckpt, large, options, setup, environment):
    command = [*filled(VERIFY[1], large), *options]
    shown = Terminal(command, setup, piped=True, **environment).finish()
    assert (shown.code, shown.raw, shown.out) == (0, "", fastckpt(*command).out)


def interrupted(
    command: list[str],
    deed: str,
    act: Callable[[Terminal], None],
    *,
    held: bool = True,
    **options: Any,
) -> Shown:
    """Run a slowed command, and do something when its progress is shown."""
    done: list[bool] = []

    def watch(terminal: Terminal, raw: str) -> None:
        if not done and re.search(rf"{deed} .*B of \d", raw):
            done.append(True)
            act(terminal)

    ended = Terminal(command, Slowed(deed if held else "", then=1.0), **options).finish(watch)
    assert done, ended
    return ended


def press_ctrl_c(terminal: Terminal) -> None:
    terminal.type(b"\x03")


@pytest.mark.parametrize(
    ("arguments", "act", "number"),
    [
        (EXPORT[1], press_ctrl_c, signal.SIGINT),
        (SAFETENSORS[1], lambda terminal: os.kill(terminal.pid, signal.SIGTERM), signal.SIGTERM),
        (EXPORT[1], Terminal.vanish, signal.SIGHUP),
    ],
    ids=["written", "terminated", "its terminal is closed"],
)
def test_an_export_that_is_ended_leaves_no_half_a_file_on_a_clean_terminal(large, arguments, act, number):
    shown = interrupted(filled(arguments, large), "write", act)
    assert shown.code == 128 + number and list((large.parent / "out").iterdir()) == []
    if act is press_ctrl_c:
        [last, end] = shown.screen
        assert last.removeprefix("^C").strip() == "fastckpt: stopped" and end == ""


def test_work_goes_on_where_the_terminal_is_lost_or_takes_nothing_or_is_another_jobs(fastckpt, large):
    command = [*filled(VERIFY[1], large), "--json"]
    answer = fastckpt(*command).out

    def outliving() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        Slowed(then=1.0)()

    def in_the_background() -> None:
        mode = termios.tcgetattr(0)
        mode[3] |= termios.TOSTOP  # who writes to it in the background is stopped
        termios.tcsetattr(0, termios.TCSANOW, mode)
        if child := os.fork():
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os.setpgid(0, 0)
        UNSEEN()

    lost = []

    def lose(terminal: Terminal, raw: str) -> None:
        if not lost and " of " in raw:
            lost.append(terminal.vanish())

    shown = Terminal(command, outliving, piped=True).finish(lose)
    assert lost and (shown.code, shown.out) == (0, answer)
    shown = interrupted(command, "verify", lambda terminal: terminal.type(b"\x13"), held=False, piped=True)  # Ctrl-S
    assert (shown.code, shown.out) == (0, answer)
    shown = Terminal(command, in_the_background, piped=True).finish()
    assert (shown.code, shown.raw, shown.out) == (0, "", answer)


# --- the line and the bytes


class Recorder:
    """Remembers the stages: deed, bytes, those of them that were reported, and in how many calls."""

    def __init__(self) -> None:
        self.stages: list[list[Any]] = []

    def begin(self, deed: str, total: int) -> None:
        self.stages.append([deed, total, 0, 0])

    def advance(self, count: int) -> None:
        assert count >= 0
        self.stages[-1][2] += count
        self.stages[-1][3] += 1


class Paper(TerminalOutput):
    """A terminal that keeps what is written to it."""

    def __init__(self, width: int) -> None:
        super().__init__(-1, "utf-8")
        self.width, self.text, self.takes = width, "", True

    def columns(self) -> int:
        return self.width

    def is_ready(self) -> bool:
        return self.takes

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


def test_the_rate_is_that_of_the_last_seconds_and_time_is_left_by_it():
    now, paper = [0.0], Paper(100)
    line = ProgressLine(paper, lambda: now[0])
    stage = WorkStage("verify", 100_000_000)

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
    assert "100.0 MB of 100.0 MB" in drawn(1, 100_000_000) and "left" not in paper.text
    stage = WorkStage("write", 5000)  # nothing of the stage before counts for it
    assert "0 B of 5.0 kB  0 B/s" in drawn(1, 0)
    assert "5.0 kB of 5.0 kB" in drawn(1, 6000)  # never more than all
    for width in (1, 40, 101):
        paper.text, paper.width = "", width
        line.draw(WorkStage("verify step 1000000", 10**13, 5 * 10**12))
        line.clear()
        lengths = [len(text) for text in re.sub(r"\x1b\[[0-9;]*m", "", paper.text).split("\r")]
        assert max(lengths[:-2]) == max(0, min(width - 3, 100)) and screen(paper.text) == [""]
    paper.text, paper.takes = "", False
    line.draw(stage)
    line.clear()
    assert paper.text == ""


def test_all_bytes_of_a_stage_are_reported_in_pieces_of_mebibytes(large, tmp_path):
    shm = os.environ["FASTCKPT_SHM_DIR"]
    recorder, inventory = Recorder(), take(str(large), shm)
    verify.verify_all(inventory, inventory.items, tracker=False, observer=recorder)
    one, two = find(f"{large}@1", shm), find(f"{large}@2", shm)
    diff_all({name: (one.file(name), two.file(name)) for name in one.files}, recorder)
    for kind in ("torch", "safetensors"):
        export_file(one.file("model.pt"), tmp_path / kind, ExportOrder(kind), one.check_unchanged, recorder)
    assert [stage[0] for stage in recorder.stages] == ["verify", "compare", "verify", "write", "verify", "write"]
    size = sum(item.size for item in inventory.items)
    assert recorder.stages[0][1] == recorder.stages[1][1] == size > 40_000_000
    for deed, total, done, calls in recorder.stages:
        assert total == done >= 20_000_000 and calls <= 4 + total // 2**20, deed
