"""Output of the commands of `fastckpt`: an answer, as one JSON document or for people to read."""

import functools
import json
import math
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from fastckpt._core.inspect.inventory import InventoryItem
from fastckpt.errors import FastckptError

FINDING, TROUBLE = 1, 2
LONGEST = 60
"""Characters of a value that are shown to people."""
READABLE_WIDTH = 100
"""Columns of a paragraph at most."""
PIPE_WIDTH = 100_000
"""Columns of a line that goes to no terminal: none is broken or cut."""


@dataclass(frozen=True)
class CommandOutput:
    """The result of a command.

    Attributes:
        document: All of it, as JSON; its keys are documented in docs/reference/cli.md.
        show: Shows it to people.
        code: The exit code.
    """

    document: Mapping[str, Any]
    show: Callable[["Screen"], None]
    code: int = 0


class Screen:
    """Standard output for people: tables with whole lines when they are piped."""

    def __init__(self) -> None:
        from rich.console import Console

        # rich breaks lines at 80 columns when the output is no terminal: grep and awk need whole ones.
        terminal = Console(highlight=False)
        piped = Console(highlight=False, width=PIPE_WIDTH, no_color=True)
        self._console = terminal if terminal.is_terminal else piped

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print rows of text; a column with a name that begins with ``>`` is aligned to the right."""
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for column in columns:
            table.add_column(column.lstrip(">"), justify="right" if column[0] == ">" else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(plain(cell)) for cell in row))
        with self._console.capture() as capture:
            self._console.print(table)
        click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))

    def line(self, text: str) -> None:
        """Print a line of text."""
        click.echo(plain(text))

    def paragraph(self, text: str, hanging: int = 0) -> None:
        """Print an indented text, which is broken at words in a terminal, and then indented by ``hanging`` more."""
        width = max(min(self._console.width, READABLE_WIDTH), 20) if self._console.is_terminal else PIPE_WIDTH
        click.echo(
            textwrap.fill(
                plain(text),
                width,
                initial_indent="  ",
                subsequent_indent=" " * (2 + hanging),
                break_long_words=False,
                break_on_hyphens=False,
            )
        )


def answering(function: Callable[..., CommandOutput]) -> Callable[..., None]:
    """Make a function that returns an answer the body of a click command with ``--json``."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
    @functools.wraps(function)
    def run(*arguments: Any, as_json: bool, **options: Any) -> None:
        try:
            with _ended_in_order():
                answer = function(*arguments, **options)
        except KeyboardInterrupt:
            # Not click's 1, which would be a finding.
            click.echo("fastckpt: stopped", err=True)
            sys.exit(128 + signal.SIGINT)
        # These name the fault and the remedy; anything else is a defect, and shows its traceback.
        except (FastckptError, OSError) as error:
            click.echo(f"fastckpt: error: {plain(str(error))}", err=True)
            sys.exit(TROUBLE)
        if as_json:
            # allow_nan=False: Python's NaN is no JSON, and other readers refuse the whole document.
            click.echo(json.dumps(answer.document, indent=2, allow_nan=False))
        else:
            answer.show(Screen())
        sys.exit(answer.code)

    return run


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Have signals that would end the process at once remove its unfinished files first."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    ours = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    signals = [number for number in ours if signal.getsignal(number) is signal.SIG_DFL]
    for number in signals:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)


REMOTE = click.option("--remote", default="", metavar="URL", help="The store that the job copies DIR to.")
"""The option of the commands that look there as well; DIR may then be lost."""


def describe(item: InventoryItem) -> dict[str, Any]:
    """A checkpoint as JSON."""
    return {
        "step": item.step,
        "history": item.history,
        "tier": item.tier,
        "state": item.state,
        "whole": item.state == "whole",
        "why": item.why,
        "size": item.size,
        "world": item.world,
        "time": item.time,
        "age": None if item.time is None else max(0.0, time.time() - item.time),
        "path": str(item.path),
    }


def number(value: float | None) -> float | str | None:
    """A number as JSON has it; infinity and NaN, which JSON does not have, as texts."""
    return value if value is None or math.isfinite(value) else str(value)


def plain(text: str) -> str:
    """A text without control characters for the terminal: names and reasons may come from a stranger's file."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def shortened(text: str) -> str:
    """The beginning of a value, with dots if that is not all."""
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def age(seconds: float | None) -> str:
    """A duration since an instant, for people."""
    if seconds is None:
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def known(value: object) -> str:
    """A value, or ``?`` if it is not known."""
    return "?" if value is None else str(value)
