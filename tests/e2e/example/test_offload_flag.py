"""The example with its activations in a directory: the very losses of the example without."""

import json
import os

from tests.e2e.example.test_train import SMALL, TRAIN, text  # noqa: F401 (a fixture)
from tests.faults.jobs import run_forked


def losses(folder, data, *more: str) -> tuple[list[str], str]:
    folder.mkdir()
    command = ["--standalone", "--nproc_per_node=1", "--log-dir", str(folder / "logs"), str(TRAIN)]
    command += [*SMALL.replace("--n_embd 64", "--n_embd 128").split(), "--batch_size", "32", "--max_steps", "4"]
    command += ["--checkpoint_dir", str(folder / "checkpoints"), "--data_dir", str(data)]
    said = run_forked(folder, *command, "--losses", folder / "losses", *more)
    lines = map(json.loads, (folder / "losses").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line], said


def test_the_example_trains_the_same_with_its_activations_offloaded(tmp_path, text, forked_launchers):  # noqa: F811
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    plain, _ = losses(tmp_path / "plain", text)
    mine, said = losses(tmp_path / "offloaded", text, "--offload", str(scratch), "--offload_budget", "4MiB")
    assert mine == plain and len(plain) == 4
    assert f"activations offloaded to {scratch}" in said and "a step: planned" in said
    assert os.listdir(scratch) == []
