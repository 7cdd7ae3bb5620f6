"""`fastckpt check`: whether a node computes, keeps and moves bytes as it should, by itself and with others."""

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from fastckpt._core.config import Settings
from fastckpt._core.policy.node_check import FLOORS, SHARE, CheckLimits, CheckResult, in_words, summary, worst
from fastckpt._core.storage.store import is_url
from fastckpt.errors import ConfigError
from fastckpt_run.cli.output import CommandOutput, Screen, answering, plain
from fastckpt_run.node_check.check_process import CheckProcess
from fastckpt_run.node_check.local_checks import DEADLINE, KINDS, LocalChecks

LONGEST = 80
"""Characters of the first line: node-problem-detector's limit for an output by default."""


def _limit(_: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, float]:
    found = dict[str, float]()
    for text in texts:
        name, equals, number = text.rpartition("=")
        try:
            found[name] = float(number)
        except ValueError:
            equals = ""
        if not equals or not name or not 0 <= found[name] < float("inf"):
            raise click.BadParameter(f"{text!r} is no limit; give NAME=NUMBER, such as disk=200", param=parameter)
        if name.partition(" ")[0] not in FLOORS:
            raise click.BadParameter(f"no check is named {name!r}; there are {', '.join(FLOORS)}", param=parameter)
    return found


@click.command()
@click.argument("directory", metavar="[DIR]", default="")
@click.option(
    "--only", "kinds", multiple=True, type=click.Choice([*KINDS, "pair"]), help="Run this check only; repeatable."
)
@click.option(
    "--min",
    "given",
    multiple=True,
    metavar="NAME=NUMBER",
    callback=_limit,
    help="Least value of a check, in its unit, as disk=200; repeatable.",
)
@click.option(
    "--baseline",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Output of `fastckpt check --json` on a good node.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1),
    default=SHARE,
    show_default=True,
    help="Share of a baseline value that is enough.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(0.1, 3600),
    default=DEADLINE,
    show_default=True,
    metavar="SECONDS",
    help="Limit of one check.",
)
@click.option("--one-line", is_flag=True, help=f"Print one line of at most {LONGEST} characters.")
@click.option("--nnodes", type=click.IntRange(1), default=1, help="Nodes to check with each other.")
@click.option("--node-rank", type=click.IntRange(0), default=0, help="Rank of this node, from 0.")
@click.option("--rdzv-endpoint", default="", metavar="HOST:PORT", help="A free port of node 0.")
@click.option(
    "--wait",
    type=click.FloatRange(0, 3600),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Wait for the other nodes.",
)
@answering
def check(directory: str, kinds: tuple[str, ...], one_line: bool, deadline: float, **options: Any) -> CommandOutput:
    """Measure this node: processors, memory, tmpfs, disk and network.

    With --nnodes, exchanges with other nodes are measured, too. The disk is that of DIR, a checkpoint directory, or
    of $TMPDIR. With DIR, failures of this host there are counted. docs/operate/node_check.md describes each check
    and its limit.

    Exit code, as for node-problem-detector: 0 all is well, 1 a problem, 2 unknown.
    """
    if is_url(directory):
        raise ConfigError(f"{directory} is a store, in which no disk is checked; name a directory")
    place = _Place(*(options[name] for name in ("nnodes", "node_rank", "rdzv_endpoint", "wait")))
    limits = CheckLimits(options["given"], _values(options["baseline"]), options["tolerance"])
    chosen = kinds or KINDS
    checks = LocalChecks.of(
        Settings.from_environment(), [directory] if directory else [], kinds=chosen, limits=limits, deadline=deadline
    )
    results = checks.run()
    results += limits.missing(results, chosen)
    absent = list[int]()
    if place.nnodes > 1 and (not kinds or "pair" in kinds):
        result, absent = place.check(results)
        results.append(limits.apply(result))
    if not results:
        raise ConfigError("there is nothing to check: --only pair takes --nnodes and --rdzv-endpoint")
    host, failures = socket.gethostname(), _failures(directory, deadline)
    verdict = worst(each.verdict for each in results)
    document = {
        "host": host,
        "verdict": str(verdict),
        "checks": [each.to_record() for each in results],
        "failures": failures,
        "absent": absent,
    }
    show = partial(_show, results=results, host=host, failures=failures, absent=absent, one_line=one_line)
    return CommandOutput(document, show, verdict.code)


@dataclass(frozen=True)
class _Place:
    """The place of this node among others that are checked with it."""

    nnodes: int
    rank: int
    endpoint: str
    wait: float

    def __post_init__(self) -> None:
        host, colon, port = self.endpoint.rpartition(":")
        if self.rank >= self.nnodes:
            raise ConfigError(f"--node-rank {self.rank} is none of --nnodes {self.nnodes}; give 0 to {self.nnodes - 1}")
        if self.nnodes > 1 and not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigError(
                f"--rdzv-endpoint is {self.endpoint!r}; give HOST:PORT, the same on all nodes: a name of node 0 by "
                "which all reach it, and a free port there"
            )

    def check(self, results: Sequence[CheckResult]) -> tuple[CheckResult, list[int]]:
        """The result of exchanges with the others, and the nodes that did not come."""
        # Imported here: it takes torch, which the other commands do without.
        from fastckpt_run.node_check.pairs_by_hand import check_by_hand

        return check_by_hand(self.endpoint, self.rank, self.nnodes, results, self.wait)


def _values(baseline: Path | None) -> dict[str, float]:
    """The values in a file that `fastckpt check --json` has written."""
    if baseline is None:
        return {}
    try:
        results = [CheckResult.from_record(each) for each in json.loads(baseline.read_text())["checks"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{baseline} is no baseline ({error}); write it on a good node: fastckpt check --json > {baseline}"
        ) from error
    return {each.name: each.value for each in results if each.value is not None}


def _failures(directory: str, deadline: float) -> dict[str, int] | None:
    """Return the numbers of failures of this host in the job of a directory; None if that has no event log."""
    if not directory:
        return None
    with CheckProcess(deadline) as process:
        return process.failures(directory, socket.gethostname())


def _show(
    screen: Screen,
    results: Sequence[CheckResult],
    host: str,
    failures: dict[str, int] | None,
    absent: Sequence[int],
    one_line: bool,
) -> None:
    screen.line(plain(summary(results, LONGEST))[:LONGEST])
    if one_line:
        return
    rows = [
        [each.name, each.verdict, _number(each.value), _number(each.limit), each.unit, each.message or "-"]
        for each in results
    ]
    screen.table(["CHECK", "VERDICT", ">VALUE", ">LIMIT", "UNIT", "WHY"], rows)
    if absent:
        screen.line(f"did not come: node {', '.join(map(str, absent))}")
    if failures is not None:
        screen.line(f"{host} has failed {failures['own']:,} times in this job, of {failures['all']:,} failures in all")


def _number(value: float | None) -> str:
    return "-" if value is None else in_words(value)
