"""`fastckpt drain`: leaves a host out of a running job, and takes it back in."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import parse_qs

import click

from fastckpt.errors import ConfigError
from fastckpt_run.cli.output import FINDING, CommandOutput, Screen, answering
from fastckpt_run.cli.top import NoAnswer, find_page, is_page, without_token

TIMEOUT = 240.0
"""Seconds that the job has: its newest save becomes durable, and another round begins."""
LARGEST = 1 << 16
_HEADER = "X-Fastckpt-Token"


@click.command()
@click.argument("host")
@click.argument("where", metavar="[URL | DIR]", default=".")
@click.option("--undo", is_flag=True, help="Admit the host again.")
@click.option("--now", is_flag=True, help="Do not wait until the newest checkpoint is durable.")
@click.option("--token", default="", help="The token after #token= in the launcher's log.")
@answering
def drain(host: str, where: str, undo: bool, now: bool, token: str) -> CommandOutput:
    """Have a running job go on without HOST, or take HOST back.

    The newest checkpoint that all nodes have becomes durable first. The workers then restart on the other hosts: with
    a spare, or on fewer nodes, as --nnodes MIN:MAX allows. Agents on HOST wait without workers until --undo, and can
    be ended.

    URL is the live page with its token, as the launcher logged it (docs/operate/live_page.md). DIR is a checkpoint
    directory, whose event log names the page. The job needs --fast-metrics-port.

    Exit code: 0 if it is done, 1 if the job refuses, 2 if it does not answer.
    """
    page, _, fragment = where.partition("#")
    url = without_token(where) if is_page(where) else find_page(page)
    token = token or "".join(parse_qs(fragment).get("token", [])[:1])
    if not token:
        raise ConfigError(
            f"no token for {url}: give the link that the launcher has logged, http://...#token=..., or --token TOKEN"
        )
    answer = ask(url, token, {"host": host, "undo": undo, "now": now})

    def show(screen: Screen) -> None:
        screen.line(in_words(answer))

    return CommandOutput({"url": url, **answer}, show, FINDING if answer["outcome"] == "refused" else 0)


def ask(url: str, token: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of a job to a request to drain; raises NoAnswer, or ConfigError if it takes none of these."""
    request = urllib.request.Request(
        f"{url}/drain", json.dumps(body).encode(), {_HEADER: token, "Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the agent is near: no proxy knows it
    try:
        with opener.open(request, timeout=TIMEOUT) as answer:
            document = json.loads(answer.read(LARGEST))
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(1000).decode(errors="replace").strip()
        raise ConfigError(f"{url} answers {error.code}: {said}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{url} is not the live page of a job") from error
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"{url} does not answer: {getattr(error, 'reason', error)}") from error
    if not (isinstance(document, dict) and isinstance(document.get("outcome"), str)):
        raise ConfigError(f"{url} is not the live page of a job")
    return document


def in_words(answer: dict[str, Any]) -> str:
    """The outcome, for people."""
    host = answer.get("host")
    match answer["outcome"]:
        case "drained":
            step = answer.get("step")
            durable = f"step {step} is durable; " if step is not None else ""
            new = f", with {', '.join(map(str, answer['new']))} in its place" if answer.get("new") else ""
            return f"{host} is drained: {durable}the job goes on with {answer.get('nodes')} nodes{new}"
        case "known":
            return f"{host} is drained already"
        case "back":
            return f"{host} is back in the job"
        case "waits":
            return f"{host} may take part again: it does when its agent runs, and the job has a place"
    return str(answer.get("why"))
