"""Files that stock DeepSpeed reads: its engine, those of layers and experts too, and its tools."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from fastckpt._core.format.skeleton import PAGE, SLACK
from fastckpt.deepspeed.topology import NAME
from tests.e2e.dcp.states import same
from tests.e2e.deepspeed.conftest import OPTIONS, tool

pytestmark = pytest.mark.frameworks

OURS = {NAME, "manifest.json", "rank_0.pt", "rank_1.pt"}


def assert_same_files(ours: Path, theirs: Path) -> None:
    assert {path.name for path in ours.iterdir()} - OURS == {path.name for path in theirs.iterdir()}
    for path in theirs.iterdir():
        written = (ours / path.name).stat().st_size
        assert 0 <= written - path.stat().st_size <= SLACK + 2 * PAGE, path
        one, other = (torch.load(place / path.name, weights_only=False) for place in (ours, theirs))
        assert same(one, other), path


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["experts", "pipeline"])
def test_layers_of_pipelines_and_experts_load_in_stock_deepspeed(tmp_path, kind):
    """Of a MoE and of a pipeline: they have files of their own."""
    program = Path(__file__).with_name("layouts.py")
    arguments = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "0")
    tool("-m", "fastckpt_run", *arguments, program, kind, tmp_path / "ours", tmp_path / "theirs", TMPDIR=str(tmp_path))
    assert_same_files(tmp_path / "ours/global_step2", tmp_path / "theirs/global_step2")
    assert list((tmp_path / "ours/global_step2").glob("layer_*"))


@pytest.mark.campaign
@pytest.mark.parametrize(("stage", "dtype"), [(1, "bf16-fp32"), (2, "bf16"), (2, "fp32"), (3, "bf16")])
def test_conversion_tools_of_deepspeed_read_our_checkpoints(new_job, tmp_path, stage, dtype):
    """zero_to_fp32.py, beside the checkpoints, gives equal weights; so does the remedy for three ranks, as printed."""
    script = ("--stage", str(stage), "--dtype", dtype, "--steps", "4", "--disk", "4", "--memory", "4", "--full")
    job = new_job("two", tmp_path / "with a blank/run").run(*script, **OPTIONS)
    if dtype != "bf16-fp32":  # DeepSpeed's optimizer for this writes files that its zero_to_fp32.py does not know
        weights = torch.load(job.folder / "full.4")[0]
        tool(job.checkpoint_dir / "zero_to_fp32.py", job.checkpoint_dir, tmp_path / "fp32")
        found = torch.load(tmp_path / "fp32/pytorch_model.bin")
        trained = {name.removesuffix(" fp32") for name in weights if name.endswith(" fp32")}
        assert trained and trained <= found.keys()
        for name in found.keys() & weights.keys():
            assert torch.equal(found[name], weights.get(f"{name} fp32", weights[name].float())), name
    refused = new_job("refused", job.checkpoint_dir)
    assert refused.start(*script, ranks=3, restarts=0, **OPTIONS).wait() == 1
    assert "was saved with data_parallel 2, now 3" in refused.text()
    tool(*shlex.split(re.search("`python (.*?)`", refused.text())[1]))
    shutil.copy(job.folder / "full.4", (wider := new_job("wider", job.checkpoint_dir)).folder)
    wider.run(*script, "--universal", ranks=3, **OPTIONS)
    assert [line["equal"] for rank in (0, 1, 2) for line in wider.log(rank) if line.get("loaded") == 4] == 3 * [True]
