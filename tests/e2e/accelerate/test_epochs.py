"""A loop whose loader counts epochs, and whose rank is killed: it resumes in the same order."""

from pathlib import Path

import pytest

from tests.faults.jobs import run_forked

PROGRAM = Path(__file__).with_name("epochs.py")


@pytest.mark.frameworks
def test_a_loop_whose_loader_counts_epochs_resumes_in_the_same_order(tmp_path: Path, forked_launchers: None) -> None:
    """The order of the epoch that was interrupted, and those of later ones, are as without the kill."""

    def used(name: str, *arguments: str) -> dict[int, set[str]]:
        shape = ("--nproc_per_node=2", "--max-restarts=2")
        text = run_forked(tmp_path, *shape, PROGRAM, tmp_path / name, *arguments, preload="accelerate")
        assert text.count("restarts left") == len(arguments) - 1, text
        assert "no epochs of data loaders" not in text
        return {rank: set((tmp_path / name / f"used.{rank}").read_text().splitlines()) for rank in (0, 1)}

    undisturbed = used("undisturbed", "skip")
    assert len({line.split(maxsplit=2)[2] for lines in undisturbed.values() for line in lines}) == 30, "orders differ"
    assert used("skip", "skip", "dies") == undisturbed
    assert used("stateful", "stateful", "dies") == undisturbed
