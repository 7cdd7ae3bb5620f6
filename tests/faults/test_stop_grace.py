"""Workers that save once more when they are stopped because another worker failed."""

import re
import socket
from pathlib import Path

import pytest

from tests.faults.nodes import Nodes


def loads(folder: Path) -> list[list[str]]:
    return [(folder / f"loaded.{rank}").read_text().splitlines() for rank in (0, 1)]


@pytest.mark.parametrize(("grace", "step"), [("0", 6), ("60", 7)])
def test_a_save_made_at_sigterm_is_resumed(new_job, grace: str, step: int) -> None:
    """Though the flush of what was the newest when the other died has begun by then."""
    job = new_job().run(program="last_save.py", restarts=1, FASTCKPT_STOP_GRACE=grace)
    assert loads(job.folder) == [["-1  ", f"{step} memory {step}"]] * 2, job.text()
    assert job.stored()[0] == step


def test_workers_stopped_for_another_node_get_sigterm_first(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    try:
        nodes.run(program="last_save.py", FASTCKPT_STOP_GRACE="60")
        assert loads(tmp_path) == [["-1  ", "7 memory 7"]] * 2, nodes.text()
        told = [[line for line in agent.text().splitlines() if "restarts left" in line] for agent in nodes.agents]
        killed = next(node for node, lines in enumerate(told) if "died" in lines[0])
        rest = r"; resumed step 7 from memory after \d+\.\d s, no step repeated, (\d+) of 20 restarts left"
        rank = rf"rank 1 died on {socket.gethostname()}: SIGKILL"
        other = "workers were stopped for another node, which failed or joined"
        assert (
            re.fullmatch(rf"fastckpt-run: {rank}{rest} \(FC-030, docs/errors.md#fc-030\)", told[killed].pop())[1]
            == "19"
        )
        assert re.fullmatch(f"fastckpt-run: {other}{rest}", told[1 - killed].pop())[1] == "20"
        assert told == [[], []], "one line each"
    finally:
        nodes.end()
