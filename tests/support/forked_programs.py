"""Programs that are processes of their own, and forks of one that has imported torch."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from tests.support import launchers

DEADLINE = 120


def run(folder: Path, program: str, ranks: Sequence[tuple[object, ...]]) -> list[tuple[int, str]]:
    """Run a program with each of these rows of arguments at a time; how each has ended, and what it said.

    It takes the fixture `forked_launchers`; without, each is executed. Variables for a rank are arguments: those that
    imports read would have it executed as well.
    """
    script = folder / "program.py"
    script.write_text(program)
    outputs = [folder / f"output-{number}" for number, _ in enumerate(ranks)]
    started = []
    for arguments, path in zip(ranks, outputs, strict=True):
        with path.open("wb") as output:
            started.append(launchers.start([str(script), *map(str, arguments)], os.environ.copy(), output.fileno()))
    try:
        codes = [each.wait(DEADLINE) for each in started]
    finally:
        for each in started:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
    return [(code, path.read_text(errors="replace")) for code, path in zip(codes, outputs, strict=True)]
