"""`fastckpt doctor`: the configuration of this host, for a checkpoint directory and for a rendezvous."""

import socket
from collections import Counter
from collections.abc import Sequence

import click

from fastckpt._core.config import Settings
from fastckpt_run.cli.output import FINDING, CommandOutput, Screen, answering
from fastckpt_run.doctor.diagnosis import Diagnosis, Severity, Subject, without_secrets, worst_of
from fastckpt_run.doctor.examination import examine
from fastckpt_run.formatting import count

DEADLINE = 30.0
_LONGEST = max(map(len, Severity))


@click.command()
@click.argument("directory", metavar="[DIR]", default="")
@click.option(
    "--rdzv-endpoint",
    "endpoints",
    default="",
    metavar="HOST:PORT[,..]",
    help="Endpoints of the rendezvous: their addresses and listeners.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(0.1, 3600),
    default=DEADLINE,
    show_default=True,
    metavar="SECONDS",
    help="Limit of one check.",
)
@answering
def doctor(directory: str, endpoints: str, deadline: float) -> CommandOutput:
    """Check what is configured here: shared memory, limits, versions.

    DIR is a checkpoint directory, which may be new, or a URL. Up to 32 MiB are written to it, and removed.
    docs/operate/doctor.md has an example. Exit code: 1 for a problem, otherwise 0.
    """
    subject = Subject(directory, endpoints, Settings.from_environment().to_environment())
    lines = examine(subject, deadline)
    state = worst_of(lines)
    document = {
        "host": socket.gethostname(),
        "directory": without_secrets(directory),
        "state": str(state),
        "lines": [line.to_record() for line in lines],
    }
    return CommandOutput(document, lambda screen: show(screen, lines), FINDING if state is Severity.PROBLEM else 0)


def show(screen: Screen, lines: Sequence[Diagnosis]) -> None:
    """Print lines, each with its remedy below it, and how many there are of each state."""
    for line in lines:
        screen.line(f"{line.state:{_LONGEST}}  {line.name}: {without_secrets(line.found)}")
        if line.remedy:
            screen.line(f"{'':{_LONGEST}}  -> {without_secrets(line.remedy)}")
    counts = Counter(line.state for line in lines)
    words = {Severity.PROBLEM: ("problem", ""), Severity.WARNING: ("warning", ""), Severity.OK: ("ok", "ok")}
    screen.line(", ".join(count(counts[state], *text) for state, text in words.items() if counts[state]))
