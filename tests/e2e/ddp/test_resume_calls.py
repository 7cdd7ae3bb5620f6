"""One rank searches storage in a resume: calls of the file system grow with the ranks, not with their square."""

from pathlib import Path

from tests.e2e.ddp.resuming import CHECKPOINTS, calls_of_a_resume

OF_EACH = 20
"""Calls of a rank, whatever the number of ranks and checkpoints: its own files, the directory, its mark."""


def test_the_first_rank_alone_searches_storage_and_each_node_reads_one_manifest(tmp_path: Path, forked_launchers: None):
    nodes, ranks = 2, 3
    calls, world = calls_of_a_resume(tmp_path, nodes, ranks), nodes * ranks
    first, *others = calls.of_rank
    # a look at each file (the model's, one of each rank), and at the manifest: before it is read, and again at the end
    assert CHECKPOINTS * (world + 1) < first <= CHECKPOINTS * (world + 1 + 3) + 2 * OF_EACH
    assert max(others) <= OF_EACH
    # the first rank knows them all; of another node the first reads the chosen one, and its other ranks take that
    assert calls.manifests == [CHECKPOINTS, *[0] * (ranks - 1), 1, *[0] * (ranks - 1)]
