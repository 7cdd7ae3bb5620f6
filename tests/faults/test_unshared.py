"""Nodes with separate checkpoint directories of one name: refused at the first load, by all ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.nodes import Nodes
from tests.faults.own_disk import needs_mounts

PROGRAMS = ["train.py", "../e2e/fsdp/train.py", "../e2e/native/train.py"]
QUICK = {"FASTCKPT_PRELOAD": "auto", "FASTCKPT_MAX_STALLS": "1"}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    needs_mounts()
    made = Nodes(tmp_path / "job")
    yield made
    made.end()


@pytest.mark.parametrize("program", PROGRAMS)
def test_nodes_with_separate_disks_under_one_name_are_refused_by_all_ranks(nodes: Nodes, program: str) -> None:
    """Node 0 has what the test sees, node 1 another: each checkpointer refuses, and says which nodes these are."""
    nodes.disks[1] = nodes.job.folder / "disk-1"
    nodes.start(program=program, **QUICK)
    assert 0 not in nodes.wait()
    text = nodes.text()
    assert f"ConfigError: {nodes.job.checkpoint_dir} is not the same directory on all nodes: nodes 0 (" in text
    assert ") have one; nodes 1 (" in text
    assert all(nodes.job.losses(rank) == {} for rank in (0, 1)), text
    marks = [(path / ".fastckpt/identity").read_text() for path in (nodes.job.checkpoint_dir, nodes.disks[1])]
    assert len(set(marks)) == 2
