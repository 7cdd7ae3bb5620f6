"""Models of pipeline stages are not taken for one model; replicas on meshes of their own are."""

import json
from pathlib import Path

import pytest

from tests.e2e.fsdp import stages
from tests.faults.jobs import run_forked


@pytest.mark.parametrize("ranks", stages.CASES)
def test_models_of_pipeline_stages_without_stage_are_refused_and_resume_with_them(
    tmp_path: Path, forked_launchers: None, ranks: int
):
    """Under FSDP1 each group had a mixture of the models of all, or that of the first group."""
    shape = ("--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0")
    output = run_forked(tmp_path, *shape, stages.__file__, tmp_path)
    said = [json.loads((tmp_path / f"said.{rank}").read_text()) for rank in range(ranks)]
    for number, way, text in (line for lines, _ in said for line in lines):
        wanted = stages.CASES[ranks][number].says.format(second=ranks // 2).split("|")
        assert all(each in text for each in wanted), (number, way, text)
    assert [len(lines) for lines, _ in said] == ranks * [sum(len(case.ways) for case in stages.CASES[ranks])]
    if ranks == 2:
        assert output.count("rank 1 has other weights than rank 0, whose are saved for all") == 1, output
        assert output.count("ranks have unlike model.0.bias, model.0.weight, ") == 2, output
        assert output.count("step 6 was given metrics, but not on all ranks: it is not saved") == 1, output
        assert said[0][1] == "asked [4, 6, 8, 12], saved [4, 8, 12]", "named and delayed once"
