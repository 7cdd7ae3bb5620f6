"""The example trained for real: runs that fail end like one that did not."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.gpt2 import options
from examples.gpt2.afterwards import weights_equal
from examples.gpt2.report import Comparison, read_lines
from fastckpt.ddp import StorageType
from tests.faults.jobs import DEADLINE, launcher_for, run_forked
from tests.support import launchers
from tests.support.waits import until

ROOT = Path(__file__).parents[3]
TRAIN = ROOT / "examples" / "ddp_gpt2" / "train.py"
SMALL = "--n_layer 2 --n_head 2 --n_embd 64 --block_size 64 --batch_size 8 --eval_blocks 4 --eval_interval 10"
SMALL += " --sample 10 --warmup 5 --device cpu"


@pytest.fixture
def text(tmp_path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "all.txt").write_bytes((ROOT / "examples/gpt2/training.py").read_bytes() * 20)
    return folder


def test_the_example_prefers_storage_to_memory_and_persists_its_last_step():
    args = options.parser(None, "").parse_args(["--save_memory_interval", "2", "--save_storage_interval", "6"])
    saved = {step: options.where_to_save(step, 13, args) for step in range(1, 14)}
    assert [step for step, place in saved.items() if place is StorageType.DISK] == [6, 12, 13]
    assert [step for step, place in saved.items() if place is StorageType.MEMORY] == [2, 4, 8, 10]


def start(folder: Path, text: Path, *more: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    command = [*launcher_for(folder), "--standalone", "--log-dir", str(folder / "logs"), str(TRAIN)]
    named = {"checkpoint_dir": folder / "checkpoints", "losses": folder / "losses", "weights": folder / "weights"}
    named |= {"data_dir": text, "max_steps": 30, "save_storage_interval": 10}
    command += [*SMALL.split(), *(str(part) for name, value in named.items() for part in (f"--{name}", value)), *more]
    with (folder / "output").open("ab") as output:
        return launchers.start(command, os.environ | {"FASTCKPT_PRELOAD": "auto"}, output.fileno())


def steps_done(folder: Path) -> int:
    losses = folder / "losses"
    return len(losses.read_bytes().splitlines()) if losses.exists() else 0


def test_an_example_stopped_and_launched_again_ends_with_the_same_weights(tmp_path, text, forked_launchers):
    """Its activations offloaded, unlike those of the one that goes on."""
    whole, stopped, scratch = tmp_path / "whole", tmp_path / "stopped", tmp_path / "scratch"
    scratch.mkdir()
    assert start(whole, text).wait(DEADLINE) == 0

    offload = ("--offload", str(scratch), "--offload_budget", "4MiB")
    job = start(stopped, text, *offload)
    until(lambda: steps_done(stopped) >= 12 or job.poll() is not None, "step 12")
    job.send_signal(signal.SIGTERM)
    assert job.wait(DEADLINE) != 0
    before = steps_done(stopped)
    assert 12 <= before < 30
    assert start(stopped, text, *offload).wait(DEADLINE) == 0

    records = read_lines(stopped / "losses")
    assert str(Comparison.of(read_lines(whole / "losses"), records)).endswith("30 of 30 steps bit for bit")
    assert weights_equal(whole / "weights", stopped / "weights")
    assert len(records) <= 30 + 1, "what memory held was flushed, so no more than the step under way is repeated"
    said = (stopped / "output").read_text()
    assert f"activations offloaded to {scratch}" in said
    assert os.listdir(scratch) == [] and "nothing is trained" not in said


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("fsdp_gpt2/train.py", marks=pytest.mark.campaign),
        pytest.param("fsdp_gpt2/train.py --fsdp1", marks=pytest.mark.campaign),
        pytest.param("ddp_gpt2/train.py", marks=pytest.mark.campaign),
        pytest.param("deepspeed_gpt2/train.py", marks=[pytest.mark.frameworks, pytest.mark.campaign]),
    ],
    ids=["fsdp2", "fsdp1", "ddp", "deepspeed"],
)
def test_the_demo_kills_a_worker_and_proves_that_nothing_changed(tmp_path, text, script):
    intervals = "--max_steps 40 --save_memory_interval 3 --save_storage_interval 20"
    named = ["--data_dir", str(text), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "examples.gpt2.demo"]
    command += [*f"examples/{script} {intervals} {SMALL}".split(), *named]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    demo = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=270, check=False)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "equal the uninterrupted run: 40 of 40 steps bit for bit" in demo.stdout
    assert "final weights   equal bit for bit" in demo.stdout
    assert "from memory" in demo.stdout
    assert "read by torch   the trained weights, bit for bit" in demo.stdout
    place = "a universal checkpoint" if "deepspeed" in script else "storage"
    assert f"one worker      resumed at step 40 from {place}, and did steps 41 to 60" in demo.stdout
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000
    events = [json.loads(line)["event"] for line in (tmp_path / "out/killed/events.jsonl").open()]
    assert events.count("killed") == 1
    assert events.count("workers_started") == 3


@pytest.mark.frameworks
@pytest.mark.campaign
@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_an_example_launched_again_resumes_within_an_epoch_and_a_third_time_trains_nothing(
    framework, tmp_path, forked_launchers
):
    program = ROOT / "examples" / framework / "train.py"

    def run(name: str, steps: int) -> list[str]:
        own = (program, "--checkpoint-dir", tmp_path / name / "checkpoints", "--steps", steps)
        said = run_forked(tmp_path / name, "--standalone", "--nproc_per_node=2", *own)
        return [line for line in said.splitlines() if line.startswith(("step ", "all "))]

    assert len(program.read_text().splitlines()) <= 60
    parts = run("parts", 14) + run("parts", 40)
    assert len(parts) == 4 and parts == run("whole", 40)
    assert run("parts", 40) == ["all 40 steps were done before: nothing is trained"]
