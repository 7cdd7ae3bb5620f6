"""Examples for accelerate and Lightning: a second launch resumes where the first has ended, a third trains nothing."""

from pathlib import Path

import pytest

from tests.faults.jobs import run_forked

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(framework: str, folder: Path, steps: int) -> list[str]:
    """Launch it; the lines of its steps, or the one that says that none is left."""
    script = (EXAMPLES / framework / "train.py", "--checkpoint-dir", folder / "checkpoints", "--steps", steps)
    said = run_forked(folder, "--standalone", "--nproc_per_node=2", *script)
    return [line for line in said.splitlines() if line.startswith(("step ", "all "))]


@pytest.mark.frameworks
@pytest.mark.campaign
@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_an_example_launched_again_resumes_within_an_epoch(framework, tmp_path, forked_launchers):
    """Its losses are those of one launch."""
    assert len(EXAMPLES.joinpath(framework, "train.py").read_text().splitlines()) <= 60
    parts = run(framework, tmp_path / "parts", 14) + run(framework, tmp_path / "parts", 40)
    assert len(parts) == 4 and parts == run(framework, tmp_path / "whole", 40)
    assert run(framework, tmp_path / "parts", 40) == ["all 40 steps were done before: nothing is trained"]
