"""The example trained for real: its schedule, and runs that fail and end like one that did not."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.ddp_gpt2.demo import weights_equal
from examples.ddp_gpt2.report import Comparison, read_lines

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ddp_gpt2"
SMALL = "--n_layer 2 --n_head 2 --n_embd 64 --block_size 64 --batch_size 8 --eval_blocks 4 --eval_interval 10"
SMALL += " --sample 10 --warmup 5 --device cpu"


@pytest.fixture
def train(monkeypatch) -> SimpleNamespace:
    """The names of train.py, found as a launcher finds them: by its own directory."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for neighbour in ("data", "model", "progress"):
        monkeypatch.delitem(sys.modules, neighbour, raising=False)
    names = runpy.run_path(str(EXAMPLE / "train.py"))
    for neighbour in ("data", "model", "progress"):
        monkeypatch.delitem(sys.modules, neighbour)
    return SimpleNamespace(**names)


@pytest.fixture
def text(tmp_path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "all.txt").write_bytes((EXAMPLE / "train.py").read_bytes() * 20)
    return folder


def test_the_learning_rate_rises_then_falls_to_a_tenth(train):
    rates = [train.learning_rate(step, steps=100, warmup=10, peak=1.0) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[54] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert train.learning_rate(1, steps=1, warmup=0, peak=1.0) == pytest.approx(0.1)


def test_storage_comes_before_memory_and_has_the_last_step(train):
    options = ["--save_memory_interval", "2", "--save_storage_interval", "6"]
    args = train.parse_arguments(options)
    saved = {step: train.where_to_save(step, 13, args) for step in range(1, 14)}
    storage, memory = train.StorageType.DISK, train.StorageType.MEMORY
    assert [step for step, place in saved.items() if place is storage] == [6, 12, 13]
    assert [step for step, place in saved.items() if place is memory] == [2, 4, 8, 10]


def start(folder: Path, text: Path, steps: int) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "fastckpt_run", "--standalone", "--nproc_per_node=1"]
    command += ["--log-dir", str(folder / "logs"), str(EXAMPLE / "train.py")]
    options = {"checkpoint_dir": folder / "checkpoints", "losses": folder / "losses", "weights": folder / "weights"}
    options |= {"data_dir": text, "max_steps": steps, "save_storage_interval": 15}
    command += [*SMALL.split(), *(str(part) for name, value in options.items() for part in (f"--{name}", value))]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})


def steps_done(folder: Path) -> int:
    losses = folder / "losses"
    return len(losses.read_bytes().splitlines()) if losses.exists() else 0


def test_a_job_that_was_stopped_and_launched_again_ends_the_same(tmp_path, text):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert start(whole, text, steps=50).wait(60) == 0

    job = start(stopped, text, steps=50)
    deadline = time.monotonic() + 60
    while steps_done(stopped) < 20 and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) != 0
    before = steps_done(stopped)
    assert 20 <= before < 50
    assert start(stopped, text, steps=50).wait(60) == 0

    records = read_lines(stopped / "losses")
    assert str(Comparison.of(read_lines(whole / "losses"), records)).endswith("50 of 50 steps bit for bit")
    assert weights_equal(whole / "weights", stopped / "weights")
    assert len(records) <= 50 + 1, "what memory held was flushed, so no more than the step under way is repeated"


def test_the_demo_kills_a_worker_and_proves_that_nothing_changed(tmp_path, text):
    intervals = "--max_steps 80 --save_memory_interval 4 --save_storage_interval 40"
    options = [*intervals.split(), *SMALL.split(), "--data_dir", str(text), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "examples.ddp_gpt2.demo", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    demo = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "equal the uninterrupted run: 80 of 80 steps bit for bit" in demo.stdout
    assert "from memory" in demo.stdout
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000
    events = [json.loads(line)["event"] for line in (tmp_path / "out/killed/events.jsonl").open()]
    assert events.count("killed") == 1
    assert events.count("workers_started") == 2
