"""Ranks that close before the others, on one node and on several."""

from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.faults.nodes import Nodes
from tests.support.json_lines import whole_lines


def said(folder: Path, rank: int) -> list[dict[str, Any]]:
    return whole_lines(folder / f"said.{rank}")


@pytest.mark.parametrize("leaves", [0, 1])
def test_after_a_rank_of_another_node_has_closed_saves_are_skipped_without_a_wait(tmp_path: Path, leaves: int):
    """Its node has no part in later saves: what the other node has of them could never be resumed."""
    nodes = Nodes(tmp_path)
    script = ("--leaves", str(leaves), "--last", "3")
    nodes.run(*script, program="departing.py")
    saves = [line for line in said(tmp_path, 1 - leaves) if "step" in line]
    assert [line["saved"] for line in saves] == [line["step"] <= 3 for line in saves]
    assert {line["reason"] for line in saves if line["step"] > 3} == {f"rank {leaves} has closed"}
    storage = CheckpointDirectory(nodes.job.checkpoint_dir)
    assert max(stored.id.step for stored in storage.checkpoints()) == 3 and storage.scan().gathered == []
    text = nodes.text()
    assert f"5 saves were skipped, as rank {leaves} has closed: the newest checkpoint is step 3" in text
    for path in tmp_path.glob("closed.*"):
        path.unlink()
    nodes.run("--leaves", "9", "--last", "8", program="departing.py")
    for rank in (0, 1):
        again = said(tmp_path, rank)
        assert {"loaded": 3, "weight": 3.0} in again and {"step": 8, "saved": True, "reason": ""} in again
    for node in (0, 1):
        nodes.shm(node).rmdir()  # all memory was given back


def test_after_an_exception_in_one_rank_a_copy_in_progress_of_another_completes(new_job):
    """Rank 1 fails when it has saved step 3, which rank 0 is still copying: that step is what is resumed."""
    job = new_job()
    code = job.start("--raises", "--last", "3", restarts=0, program="departing.py").wait()
    assert code == 1 and "the disk of the logger is full" in job.text()
    job.run("--last", "8", program="departing.py", restarts=0)
    assert [{"loaded": 3, "weight": 3.0} in said(job.folder, rank) for rank in (0, 1)] == [True, True]
