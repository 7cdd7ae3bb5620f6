"""`fastckpt top`: a job while it runs, in the terminal."""

import http.client
import json
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from fastckpt._core.storage.store import is_url
from fastckpt.errors import ConfigError, FastckptError
from fastckpt_run.cli.output import TROUBLE, CommandOutput, Screen, answering, plain

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text

    from fastckpt._core.report.events import Event

INTERVAL = 2.0
"""Seconds between two looks at the job."""
TIMEOUT = 10.0
"""Seconds that the agent has to answer."""
_STYLES = {"good": "green", "busy": "yellow", "bad": "bold red"}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


_KEYS: dict[str, type | tuple[type, ...]] = {
    "at": (int, float),
    "job": dict,
    "steps": dict,
    "nodes": list,
    "loss": list,
    "events": list,
    "trouble": str,
}
"""Some keys of the document of each job, and their types."""


class NoAnswer(FastckptError):
    """The agent of the job does not answer."""


@click.command()
@click.argument("where", metavar="[URL | DIR]", default=".")
@click.option("--once", is_flag=True, help="Print it once.")
@answering
def top(where: str, once: bool) -> CommandOutput:
    """Show a job while it runs: workers, checkpoints, newest events.

    URL is its live page (docs/operate/live_page.md). DIR is a checkpoint directory, whose event log names the page.
    The job needs --fast-metrics-port. In a pipe, with --once and with --json it is shown once.

    Exit code: 0 if the job answered last, or has ended; otherwise 2.
    """
    directory = "" if is_page(where) else where
    url = find_page(where) if directory else without_token(where)
    document = fetch(url)

    def show(screen: Screen) -> None:
        if not sys.stdout.isatty():
            _print(screen, document)
        elif once:
            _terminal().print(_Drawing(document, ""))
        elif not _follow(url, document, directory):
            sys.exit(TROUBLE)

    return CommandOutput({"url": url, **document}, show)


def is_page(where: str) -> bool:
    """Return whether this is a URL, not a directory."""
    return where.startswith(("http://", "https://"))


def without_token(url: str) -> str:
    """The URL of the page, without the token that the launcher logs with it."""
    return url.partition("#")[0].rstrip("/")


def find_page(directory: str) -> str:
    """The URL of the live page of the job that runs with a checkpoint directory, as its event logs name it.

    Raises ConfigError if no job runs there, or none that serves a page to this machine.
    """
    from fastckpt._core.report.events import find, read, text, whole

    if is_url(directory):
        raise ConfigError(f"{directory} is a store, which has no event log: give the URL of the page")
    if not Path(directory).is_dir():
        raise ConfigError(f"{directory} is no directory; give a checkpoint directory, or the URL of the live page")
    ended = ""
    for path in reversed(find(directory)):
        events = read(path).events
        begin = _last(events, "job_started")
        node = whole(_last(events, "rendezvous"), "node", 0)
        if node != 0 or not begin:
            continue
        if end := _last(events, "job_ended"):
            ended = ended or f"the last job with {directory} has ended: {text(end, 'outcome')}; see fastckpt report"
            continue
        if ended:
            break  # a launch that was killed before that
        return _reachable(text(begin, "page"), text(begin, "host"), directory)
    raise ConfigError(ended or f"{directory} has no event log of the first node of a job")


def _last(events: "list[Event]", name: str) -> "Event":
    return next((event for event in reversed(events) if event["event"] == name), {})


def _reachable(page: str, host: str, directory: str) -> str:
    if not page:
        raise ConfigError(f"the job with {directory} serves no page: start it with --fast-metrics-port")
    if urlsplit(page).hostname in _LOOPBACK and host != socket.gethostname():
        raise ConfigError(
            f"the page of the job is {page} on {host}, for that machine alone: run this there, forward its port "
            "(ssh -L), or start the job with --fast-metrics-port 0.0.0.0:PORT"
        )
    return page if urlsplit(page).hostname in _LOOPBACK or host == socket.gethostname() else _at(page, host)


def _at(page: str, host: str) -> str:
    """A page that is served to all machines, by the name of its host."""
    return f"http://{host}:{urlsplit(page).port}"


def fetch(url: str) -> dict[str, Any]:
    """The state of the job; raises NoAnswer, or ConfigError if the answer is no page of a job."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the agent is near: no proxy knows it
    try:
        with opener.open(f"{url}/status.json", timeout=TIMEOUT) as answer:
            document = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(1000).decode(errors="replace").strip()
        raise ConfigError(f"{url} answers {error.code}: {said}") from error
    # A server of another kind answers in its own way; one that dies while it answers leaves the answer torn.
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        is_torn = isinstance(error, http.client.IncompleteRead)
        if isinstance(error, ValueError | RecursionError | http.client.HTTPException) and not is_torn:
            raise ConfigError(f"{url} is not the live page of a job") from error
        reason = getattr(error, "reason", error)
        raise NoAnswer(f"{url} does not answer: {reason}; the job has ended, or its agent is gone") from error
    if not isinstance(document, dict) or not all(isinstance(document.get(name), kind) for name, kind in _KEYS.items()):
        raise ConfigError(f"{url} is not the live page of a job")
    return document


def _print(screen: Screen, document: Mapping[str, Any]) -> None:
    from fastckpt_run.views.top_text import TextTable, blocks

    for block in blocks(document):
        if isinstance(block, TextTable):
            screen.line("")
            screen.table(block.columns, block.rows)
        else:
            screen.line(block)


def _follow(url: str, document: dict[str, Any], directory: str) -> bool:
    """Show the job until Ctrl-C, or its end; return whether it answered last, or has ended by its log."""
    from rich.live import Live

    silent_since, note = 0.0, ""
    console = _terminal()
    try:
        with Live(_Drawing(document, ""), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(INTERVAL)
                try:
                    document, note, silent_since = fetch(url), "", 0.0
                except (NoAnswer, ConfigError) as error:
                    silent_since = silent_since or time.monotonic()
                    age = time.time() - document["at"]
                    note = f"{error}. What is shown is {age:.0f} s old"
                    if ended := _outcome(directory):
                        break
                live.update(_Drawing(document, note), refresh=True)
    except KeyboardInterrupt:
        ended = ""
    console.print(_Drawing(document, ended or note))
    return bool(ended) or not silent_since


def _outcome(directory: str) -> str:
    """Return the end of the job by its event log; empty if it is not known."""
    if not directory:
        return ""
    try:
        find_page(directory)
    except (FastckptError, OSError) as error:
        return str(error) if "has ended" in str(error) else ""
    return ""


def _terminal() -> "Console":
    """Standard output, a terminal: in colour, unless NO_COLOR or TERM forbids it."""
    from rich.console import Console

    return Console(highlight=False)


class _Drawing:
    """All of it for a terminal, in the width of that when it is drawn."""

    def __init__(self, document: Mapping[str, Any], note: str) -> None:
        self._document, self._note = document, note

    def __rich_console__(self, _: "Console", options: "ConsoleOptions") -> Iterator["Text | Table"]:
        from rich.table import Table
        from rich.text import Text

        from fastckpt_run.views.top_text import GAP, TextTable, Toned, blocks

        def text(shown: str) -> Text:
            return Text(plain(shown), style=_STYLES.get(shown.tone, "") if isinstance(shown, Toned) else "")

        if self._note:
            yield Text(plain(self._note), style=_STYLES["bad"])
        for number, block in enumerate(blocks(self._document, options.max_width)):
            if not isinstance(block, TextTable):
                line = text(block)
                if number == 0:
                    line.stylize("bold")
                yield line
                continue
            table = Table(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0), header_style="bold cyan")
            for column in block.columns:
                is_right = column.startswith(">")
                table.add_column(column.lstrip(">"), justify="right" if is_right else "left", overflow="fold")
            for row in block.rows:
                table.add_row(*map(text, row))
            yield Text("")
            yield table
