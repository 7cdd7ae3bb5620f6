"""Runs of train.py that nothing befalls: on this machine, without hosts, launcher and saves."""

import os
from pathlib import Path

from tests.nodes.hosts import ROOT
from tests.nodes.recovery import Losses, losses_of
from tests.support import launchers
from tests.support.json_lines import whole_lines
from tests.support.ports import free_port

PROGRAM = Path(__file__).with_name("train.py")


def train_uninterrupted(folder: Path, ranks: int, *script: str) -> None:
    """Run it to its end on so many ranks, which log into a folder."""
    for log in folder.glob("log.*"):
        log.unlink()  # of an attempt that failed
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    place |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
    places = ("--out", str(folder), "--checkpoint-dir", str(folder))
    command = [str(PROGRAM), *places, "--saver", "none", "--pace", "0", *script]
    with (folder / "output").open("ab") as output:
        environments = [os.environ | place | {"RANK": str(rank)} for rank in range(ranks)]
        workers = [launchers.start(command, variables, output.fileno()) for variables in environments]
    codes = [worker.wait(300) for worker in workers]
    assert codes == [0] * ranks, (folder / "output").read_text()


def losses_in(folder: Path) -> Losses:
    """Of each step and batch, what all hosts of a job have logged in a folder."""
    return losses_of([line for log in folder.glob("log.*") for line in whole_lines(log)])
