"""Progress of long work in a terminal: bytes done, rate and time left, on standard error; nothing in a pipe."""

import contextlib
import functools
import math
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

import click

from fastckpt._core.byte_sizes import decimal
from fastckpt._core.inspect.work_progress import UNOBSERVED, WorkObserver
from fastckpt_run.formatting import duration

DELAY = 0.5
"""Seconds after which work is long."""
PERIOD = 0.2
"""Seconds between two drawings."""
LAST_DRAWING = 2.0
"""Seconds that the end of the work waits for the last drawing: a terminal may have stopped to take anything."""
WIDEST, SHORTEST_BAR, FREE, UNKNOWN_WIDTH = 100, 10, 3, 80
"""Columns: of the line at most, of a bar at least, behind the line, and of a terminal of unknown width."""
WINDOW = 10.0
"""Seconds over which the rate is taken."""


def observed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give the body of a command an ``observer`` that shows its progress, and the option ``--quiet``."""

    @click.option("--quiet", is_flag=True, help="Show no progress of long work.")
    @functools.wraps(function)
    def run(*arguments: Any, quiet: bool, **options: Any) -> Any:
        with _shown(quiet=quiet) as observer:
            return function(*arguments, observer=observer, **options)

    return run


@contextlib.contextmanager
def _shown(*, quiet: bool) -> Iterator[WorkObserver]:
    """An observer that removes its line from the terminal when the block ends, in any way."""
    descriptor = None if quiet else _terminal()
    if descriptor is None:
        yield UNOBSERVED
        return
    progress = TerminalProgress(descriptor)
    try:
        yield progress
    finally:
        progress.end()


def _terminal() -> int | None:
    """The descriptor of standard error, if that is a terminal."""
    try:
        return sys.stderr.fileno() if sys.stderr.isatty() else None
    except (AttributeError, OSError, ValueError):
        return None  # it is closed, or something else has taken its place


@dataclass(eq=False)
class WorkStage:
    """Progress of the work: the work writes it, and the thread that draws reads it."""

    deed: str
    total: int
    done: int = 0


class TerminalOutput:
    """The terminal at a descriptor, as far as a line of progress needs it; methods that rich's lacks are ours."""

    def __init__(self, descriptor: int, encoding: str) -> None:
        self.encoding = encoding
        self._descriptor = descriptor

    def columns(self) -> int:
        """Its width now."""
        return os.get_terminal_size(self._descriptor).columns or UNKNOWN_WIDTH

    def is_ready(self) -> bool:
        """Return whether the terminal takes a line at once.

        It does not while it is stopped (Ctrl-S), or while another job has it (``&``).

        Raises OSError if it is gone.
        """
        with contextlib.suppress(OSError):  # it is not the one that controls this process
            if os.tcgetpgrp(self._descriptor) != os.getpgrp():
                return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return any(event & select.POLLOUT for _, event in poll.poll(0))

    def write(self, text: str) -> int:
        """Write a text past Python's buffer: its lock would be held for as long as a write hangs."""
        data = text.encode(self.encoding, "replace")
        while data:
            data = data[os.write(self._descriptor, data) :]
        return len(text)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""


class TerminalProgress:
    """Follows work, and draws it in one line of a terminal as soon as it has taken a while.

    A thread draws: the work only adds numbers, so no terminal can delay it. The line is drawn over itself after a
    carriage return. Neither the cursor is hidden nor a mode set, which a process that is stopped or killed could not
    set right again.
    """

    def __init__(self, descriptor: int) -> None:
        self._terminal = TerminalOutput(descriptor, sys.stderr.encoding)
        self._stage: WorkStage | None = None
        self._ended = threading.Event()
        # A daemon: one that hangs in a write to a terminal must not keep the process.
        self._thread = threading.Thread(target=self._draw, name="fastckpt-progress", daemon=True)

    def begin(self, deed: str, total: int) -> None:
        """Begin the next stage of the work; nothing is shown of one without bytes."""
        first, self._stage = self._stage is None, WorkStage(deed, total)
        if first:
            self._thread.start()

    def advance(self, count: int) -> None:
        """Count bytes of the stage that was begun last."""
        assert self._stage is not None
        self._stage.done += count

    def end(self) -> None:
        """Clear the line."""
        self._ended.set()
        if self._stage is not None:
            self._thread.join(LAST_DRAWING)

    def _draw(self) -> None:
        if self._ended.wait(DELAY):
            return
        with contextlib.suppress(OSError):  # the terminal is gone; the work goes on
            line = ProgressLine(self._terminal)
            while not self._ended.wait(PERIOD) and line.is_shown:
                if (stage := self._stage) is not None and stage.total:
                    line.draw(stage)
            line.clear()


class ProgressLine:
    """One line of a terminal, drawn again and again; none on a dumb one, which would show each drawing."""

    def __init__(self, terminal: TerminalOutput, clock: Callable[[], float] = time.monotonic) -> None:
        # Imported here: rich takes a while, and short work needs none of it.
        from rich.console import Console

        self._terminal, self._clock = terminal, clock
        self._console = Console(file=cast(IO[str], terminal), force_terminal=True, highlight=False)
        self._stage: WorkStage | None = None
        self._seen: deque[tuple[float, int]] = deque(maxlen=round(WINDOW / PERIOD))
        self._is_drawn = False
        self.is_shown = not self._console.is_dumb_terminal

    def draw(self, stage: WorkStage) -> None:
        """Draw how far a stage is, if the terminal takes it now."""
        if stage is not self._stage:
            self._stage = stage
            self._seen.clear()
        self._seen.append((self._clock(), stage.done))
        if self._terminal.is_ready():
            # The last columns stay free: for the ^C of a terminal that shows it, and since a cursor behind the last one
            # is in the next line on some.
            self._is_drawn = True
            self._terminal.write("\r" + self._rendered(stage, max(0, min(WIDEST, self._terminal.columns() - FREE))))

    def clear(self) -> None:
        """Leave an empty line, with the cursor at its begin."""
        if self._is_drawn and self._terminal.is_ready():
            # A terminal that has become narrower has wrapped text into other lines, where it stays.
            self._terminal.write("\r" + " " * (self._terminal.columns() - 1) + "\r")

    def _rendered(self, stage: WorkStage, width: int) -> str:
        """The line, of exactly that width: without a bar, or cut, where there is no room."""
        from rich.progress_bar import ProgressBar

        done, rate = min(stage.done, stage.total), self._rate()
        amounts = f"{decimal(done)} of {decimal(stage.total)}  {decimal(int(rate))}/s  {_left(stage, rate)}"
        free = width - len(stage.deed) - len(amounts) - 4
        if free < SHORTEST_BAR:
            return f"{stage.deed}  {amounts}"[:width].ljust(width)
        # The free width changes each time: the bar must not jump with it.
        length = max(SHORTEST_BAR, free // 5 * 5)
        with self._console.capture() as capture:
            self._console.print(ProgressBar(stage.total, done, length), end="")
        return f"{stage.deed}  {capture.get()}  {amounts}{' ' * (free - length)}"

    def _rate(self) -> float:
        """Bytes per second in the time that is remembered."""
        (begin, before), (end, after) = self._seen[0], self._seen[-1]
        return (after - before) / (end - begin) if end > begin else 0.0


def _left(stage: WorkStage, rate: float) -> str:
    rest = stage.total - stage.done
    return f"{duration(math.ceil(rest / rate) * 10**9)} left" if rest > 0 and rate > 0 else ""
