"""A finished job that is started again trains nothing, reports so, and leaves its final state as it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
AGAIN = Path(__file__).with_name("again.py")
OTHERS = [pytest.mark.frameworks, pytest.mark.campaign]
SMALL = "--n_layer 1 --n_head 1 --n_embd 16 --block_size 16 --batch_size 2 --eval_blocks 1 --eval_interval 9 --sample 4"


@pytest.mark.parametrize(
    "names",
    [
        ["ddp_gpt2", "fsdp_gpt2"],
        *(pytest.param([name], marks=OTHERS) for name in ("deepspeed_gpt2", "accelerate", "lightning")),
    ],
    ids=" ".join,
)
def test_a_finished_example_launched_again_trains_nothing_and_keeps_its_state(names: list[str], tmp_path: Path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "all.txt").write_bytes((ROOT / "examples/gpt2/training.py").read_bytes())
    given = [part for name in names for part in (name, *options(name, tmp_path), ",")]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(AGAIN), str(tmp_path), *given[:-1]]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=290, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in names:
        first, second = ((tmp_path / f"{name}.{turn}").read_text() for turn in ("first", "second"))
        assert "nothing is trained" not in first, name
        assert "all 4 steps were done before: nothing is trained" in second and "loss" not in second, (name, second)
        before, after = (json.loads((tmp_path / f"{name}.{turn}-files").read_text()) for turn in ("first", "second"))
        assert before and before == after, name


def options(name: str, folder: Path) -> list[str]:
    checkpoints = str(folder / f"{name}-checkpoints")
    if not name.endswith("gpt2"):
        return ["--checkpoint-dir", checkpoints, "--steps", "4"]
    files = ["--checkpoint_dir", checkpoints, "--data_dir", str(folder / "text")]
    return [*SMALL.split(), "--device", "cpu", "--max_steps", "4", "--warmup", "1", "--log_interval", "1", *files]
