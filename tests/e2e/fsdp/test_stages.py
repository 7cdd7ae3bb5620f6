"""Models of pipeline stages are not taken for one model; replicas on meshes of their own are."""

import json
from pathlib import Path

import pytest

from tests.faults.jobs import run_forked

STAGES = Path(__file__).with_name("stages.py")
RESUMED = "resumed 1, equal: True"
SHARDED = ["in_three_lines"]
ALL = [*SHARDED, "in_full"]
OF_BOTH = [
    ("equal names", ALL, "give stage= to"),
    ("replicas", ALL, RESUMED),
    ("own names", ["in_full"], "rank {second} has another model than rank 0"),
    ("own names", SHARDED, "params of rank {second} has other parameters than that of rank 0"),
    ("stages", SHARDED, RESUMED),
]
OF_TWO_RANKS = [
    ("equal names", ALL, "model.0.weight of rank 0 is not that of rank 1"),
    ("equal names", ALL, "pipeline stages"),
    ("plain stages", SHARDED, RESUMED),
    ("one stage", SHARDED, "give stage= on all ranks, or on none"),
    ("a bad stage", SHARDED, "a number, or a word"),
    ("loaded without", SHARDED, "has the stages 0, last, and this job no stages"),
    ("loaded as others", SHARDED, "has the stages 0, last, and this job the stages 0, 1"),
    ("plain, own names", SHARDED, "pipeline stages"),
    ("plain", ["by_hand"], "True"),
]
OF_TWO_GROUPS = [
    ("equal names", SHARDED, "model.0.weight of rank 0 is not that of rank 2"),
    ("equal names", ["in_full"], "0.weight of rank 0 is not that of rank 2"),
    ("hybrid", ALL, RESUMED),
    ("flat", ["in_full"], "0.weight of rank 0 is not that of rank 2"),
    ("flat", SHARDED, "use_orig_params=True, or use fully_shard"),
    ("flat stages", SHARDED, "use_orig_params=True, or use fully_shard"),
]


@pytest.mark.parametrize(("ranks", "table"), [(2, OF_BOTH + OF_TWO_RANKS), (4, OF_BOTH + OF_TWO_GROUPS)])
def test_models_of_pipeline_stages_without_stage_are_refused_and_resume_with_them(
    tmp_path: Path, forked_launchers: None, ranks: int, table: list[tuple[str, list[str], str]]
):
    """Under FSDP1 each group had a mixture of the models of all, or that of the first group."""
    output = run_forked(tmp_path, "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0", STAGES, tmp_path)
    for rank in range(ranks):
        said = json.loads((tmp_path / f"said.{rank}").read_text())
        for case, ways, text in table:
            for way in ways:
                assert text.format(second=ranks // 2) in said[f"{way}, {case}"]
    if ranks == 2:
        assert output.count("rank 1 has other weights than rank 0, whose are saved for all") == 1, output
        assert output.count("ranks have unlike model.0.bias, model.0.weight, ") == 2, output
