"""Models of pipeline stages are not taken for one model; replicas on meshes of their own are."""

import json
import os
import shutil
import signal
from pathlib import Path

from tests.e2e.fsdp import stages
from tests.faults.jobs import run_forked


def test_models_of_pipeline_stages_without_stage_are_refused_and_resume_with_them(
    tmp_path: Path, forked_launchers: None
):
    """Under FSDP1 each group had a mixture of the models of all, or that of the first group."""
    pipelines = {}
    for ranks, code in ((4, -signal.SIGKILL), (2, 0)):
        folder = tmp_path / str(ranks)
        shape = ("--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0")
        output = run_forked(folder, *shape, stages.__file__, folder, code=code)
        said = [json.loads((folder / f"said.{rank}").read_text()) for rank in range(ranks)]
        for number, way, text in (line for lines, *_ in said for line in lines):
            wanted = stages.CASES[ranks][number].says.format(second=ranks // 2).split("|")
            assert all(each in text for each in wanted), (number, way, text)
        assert [len(lines) for lines, *_ in said] == ranks * [sum(len(case.ways) for case in stages.CASES[ranks])]
        pipelines[ranks] = [pipeline for *_, pipeline in said]
    assert output.count("rank 1 has other weights than rank 0, whose are saved for all") == 1, output
    assert output.count("ranks have unlike model.0.bias, model.0.weight, ") == 2, output
    assert output.count("step 6 was given metrics, but not on all ranks: it is not saved") == 1, output
    assert said[0][1] == "asked [4, 6, 8, 12], saved [4, 8, 12]", "named and delayed once"
    for (first, *_, saved), (step, tier, loaded, _) in zip(pipelines[4][::2], pipelines[2], strict=True):
        assert (first, step, tier, loaded) == (0, 2, "memory", saved), "at another data-parallel size"
    for arena in Path(os.environ["FASTCKPT_SHM_DIR"]).iterdir():
        shutil.rmtree(arena)  # of the agent that was killed
