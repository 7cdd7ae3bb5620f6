"""Real jobs of several nodes, each with memory of its own: workers and agents die, memory is lost or damaged."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fsdp.conftest import PROGRAM
from tests.faults.nodes import Nodes

OPTIONS = {"program": PROGRAM, "FASTCKPT_PRELOAD": "auto"}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path / "job")
    yield made
    made.end()


@pytest.mark.campaign
@pytest.mark.parametrize(("disk", "found"), [("4", (12, "mixed")), ("7", (7, "storage"))])
def test_a_load_in_another_sharding_that_needs_memory_of_other_nodes_uses_storage(nodes, disk, found):
    """The world is the same: memory, which has steps 8 to 12, seems to do until the plan of the load is known."""
    script = ("--full", "--memory", "2", "--disk", disk)
    nodes.start("--steps", "12", "--die", "--way", "fsdp2", *script, **OPTIONS)
    nodes.wait_for_death(0)
    os.kill(nodes.agents[1].process.pid, signal.SIGKILL)
    nodes.wait_for_death(1)
    nodes.run("--steps", "14", "--way", "tp", *script, **OPTIONS, FAULTS_LAUNCH="2")
    lines = [line for rank in (0, 1) for line in nodes.job.log(rank) if line.get("start") == [2, 0]]
    assert [line["equal"] for line in lines] == [True, True]
    assert {(line["loaded"], line["tier"]) for line in lines} == {found}
