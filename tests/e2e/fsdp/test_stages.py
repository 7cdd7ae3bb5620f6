"""Models of pipeline stages are not taken for one model; replicas on meshes of their own are."""

import json
from pathlib import Path

import pytest

from tests.faults.jobs import run_forked

pytestmark = pytest.mark.usefixtures("forked_launchers")

STAGES = Path(__file__).with_name("stages.py")


def launched(program: Path, ranks: int, folder: Path) -> str:
    """Run it; what it writes."""
    return run_forked(folder, "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0", program, folder)


def test_models_of_pipeline_stages_without_stage_are_refused_at_the_first_save(tmp_path: Path):
    stderr = launched(STAGES, 2, tmp_path)
    assert stderr.count("rank 1 has other weights than rank 0, whose are saved for all") == 1, stderr
    assert stderr.count("ranks have unlike model.0.bias, model.0.weight, ") == 2, stderr
    for rank in (0, 1):
        said = json.loads((tmp_path / f"said.{rank}").read_text())
        for way in ("in_three_lines", "by_hand", "in_full"):
            assert "model.0.weight of rank 0 is not that of rank 1" in said[f"{way}, equal names"]
            assert "pipeline stages" in said[f"{way}, equal names"]
            assert said[f"{way}, replicas"] == "resumed 1, equal: True"
        assert "rank 1 has another model than rank 0" in said["in_full, own names"]
        for way in ("in_three_lines", "by_hand"):
            assert "params of rank 1 has other parameters than that of rank 0" in said[f"{way}, own names"]
            assert said[f"{way}, stages"] == said[f"{way}, plain stages"] == "resumed 1, equal: True"
            assert "give stage= on all ranks, or on none" in said[f"{way}, one stage"]
            assert "a number, or a word" in said[f"{way}, a bad stage"]
            assert "has the stages 0, last, and this job no stages" in said[f"{way}, loaded without"]
            assert "has the stages 0, last, and this job the stages 0, 1" in said[f"{way}, loaded as others"]
            assert "has no stages, and this job the stages 0" in said[f"{way}, loaded with"]
            assert "pipeline stages" in said[f"{way}, plain, own names"]


def test_fsdp1_in_several_groups_is_refused_without_stages_and_resumes_with_them(tmp_path: Path):
    """Each group had a mixture of the models of all, or that of the first group."""
    launched(STAGES.with_name("groups.py"), 4, tmp_path)
    for rank in range(4):
        said = json.loads((tmp_path / f"said.{rank}").read_text())
        for way, model in (("in_three_lines", "model."), ("by_hand", "model."), ("in_full", "")):
            assert f"{model}0.weight of rank 0 is not that of rank 2" in said[f"{way}, equal names"]
            assert "give stage= to" in said[f"{way}, equal names"]
            assert said[f"{way}, replicas"] == said[f"{way}, hybrid"] == "resumed 1, equal: True"
        assert "rank 2 has another model than rank 0" in said["in_full, own names"]
        for case in ("flat", "no shards"):
            assert "0.weight of rank 0 is not that of rank 2" in said[f"in_full, {case}"]
        for way in ("in_three_lines", "by_hand"):
            assert "params of rank 2 has other parameters than that of rank 0" in said[f"{way}, own names"]
            assert said[f"{way}, stages"] == said[f"{way}, stages, own names"] == "resumed 1, equal: True"
            for case in ("flat", "flat stages"):
                assert "use_orig_params=True, or use fully_shard" in said[f"{way}, {case}"]
