"""Files exchanged with stock DeepSpeed in both directions: its engine, and its tools."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt._core.format.skeleton import PAGE, SLACK
from fastckpt.deepspeed.topology import NAME
from tests.e2e.deepspeed.conftest import KINDS, OPTIONS, stock, tool
from tests.faults.jobs import Job

pytestmark = pytest.mark.frameworks

OURS = {NAME, "manifest.json", "rank_0.pt", "rank_1.pt"}


def states(job: Job, what: str) -> list[tuple[int, str]]:
    """Step and digest of what each rank had when it was loaded, or at the end."""
    return [[(line[what], line["state"]) for line in job.log(rank) if what in line][-1] for rank in (0, 1)]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or vars(one) == vars(other)


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
@pytest.mark.parametrize(("stage", "dtype"), KINDS)
def test_stock_deepspeed_loads_the_same_files_in_each_zero_stage(new_job, stage, dtype):
    script = ("--stage", str(stage), "--dtype", dtype)
    ours = new_job("ours").run("--steps", "4", "--disk", "4", *script, **OPTIONS)
    reader = stock(new_job("reader", ours.checkpoint_dir), "--steps", "4", *script)
    assert states(reader, "loaded") == states(ours, "end"), "DeepSpeed loads what we wrote"
    theirs = stock(new_job("theirs"), "--steps", "4", "--memory", "4", *script)
    assert states(theirs, "end") == states(ours, "end"), "saving changes nothing"
    assert_same_files(ours.checkpoint_dir / "global_step4", theirs.checkpoint_dir / "global_step4")
    names = {path.name for path in theirs.checkpoint_dir.iterdir()}
    assert {path.name for path in ours.checkpoint_dir.iterdir()} == names | {
        ".fastckpt",
        "latest_checkpointed_iteration.txt",
    }
    assert (ours.checkpoint_dir / "latest").read_text() == (theirs.checkpoint_dir / "latest").read_text()
    for path, arguments in [(theirs.checkpoint_dir, []), (None, ["--load-dir", str(theirs.checkpoint_dir)])]:
        again = new_job(f"again-{len(arguments)}", path).run("--steps", "4", *arguments, *script, **OPTIONS)
        assert states(again, "loaded") == states(theirs, "end"), "we load what DeepSpeed wrote"


def assert_gives_the_weights(directory: Path, out: Path, weights: dict[str, torch.Tensor]) -> None:
    tool(directory / "zero_to_fp32.py", directory, out)
    found = torch.load(out / "pytorch_model.bin")
    trained = {name.removesuffix(" fp32") for name in weights if name.endswith(" fp32")}
    assert trained and trained <= found.keys()
    for name in found.keys() & weights.keys():
        assert torch.equal(found[name], weights.get(f"{name} fp32", weights[name].float())), name


@pytest.mark.campaign
@pytest.mark.parametrize(("stage", "dtype"), [kind for kind in KINDS if kind[0]])
def test_conversion_tools_of_deepspeed_read_our_checkpoints(new_job, tmp_path, stage, dtype):
    """zero_to_fp32.py, beside the checkpoints, gives equal weights; so does ds_to_universal, to three ranks."""
    script = ("--stage", str(stage), "--dtype", dtype, "--steps", "4", "--disk", "4")
    job = new_job().run(*script, **OPTIONS)
    if dtype != "bf16-fp32":  # DeepSpeed's optimizer for this writes files that its zero_to_fp32.py does not know
        assert_gives_the_weights(job.checkpoint_dir, tmp_path / "fp32", torch.load(job.folder / "weights"))
    place = job.checkpoint_dir / "global_step4"
    missing = ["--inject_missing_state"]
    tool(
        "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", place,
        "--output_folder", f"{place}_universal", *missing,
    )  # fmt: skip
    refused = new_job("refused", job.checkpoint_dir)
    assert refused.start(*script, ranks=3, restarts=0, **OPTIONS).wait() == 1
    assert "was saved with data_parallel 2, now 3" in refused.text()
    wider = new_job("wider", job.checkpoint_dir).run(*script, "--universal", ranks=3, **OPTIONS)
    assert states(wider, "loaded") == states(job, "end")
    assert wider.ranks() == [0, 1, 2]
