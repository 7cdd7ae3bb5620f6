"""The page of benchmarks: made from the recorded runs, of modules that are there, by a harness that runs a real job."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import benchmarks
from benchmarks.harness import page
from benchmarks.harness.results import FOLDER, load
from benchmarks.harness.turn import Turn, values_of
from benchmarks.suite.saves import device_save

KNOWN = benchmarks()


def test_tables_and_pictures_are_those_of_the_recorded_runs():
    text = page.PAGE.read_text()
    assert page.written(text, KNOWN) == text
    for name, svg in page.pictures(KNOWN.values()):
        assert (page.IMAGES / name).read_text() == svg, name


def test_each_benchmark_has_a_section_and_each_result_a_benchmark():
    assert sorted(page.marked(page.PAGE.read_text())) == sorted(KNOWN)
    assert {path.stem for path in FOLDER.glob("*")} <= KNOWN.keys()
    for name, benchmark in KNOWN.items():
        for run in load(name):
            took_part = {sample["contender"] for sample in run.samples}
            assert took_part and took_part | run.missing.keys() <= {each.name for each in benchmark.contenders}


def test_the_page_shows_neither_quick_runs_nor_those_of_earlier_code():
    runs = [run for name in KNOWN for run in load(name)]
    kept = page.counted([*runs, replace(runs[0], is_quick=True), replace(runs[0], label="before")])
    assert kept and not any(run.is_quick or run.label.startswith("before") for run in kept)


@pytest.mark.campaign
def test_the_worker_of_the_benchmark_of_an_accelerator_runs_on_the_cpu(tmp_path: Path):
    turn = Turn(0.002, is_quick=True, folder=tmp_path, shm=Path(os.environ["FASTCKPT_SHM_DIR"]))
    records = turn.job(device_save.save_beside_steps, "cpu", True, False)
    quantities = {name: len(values_of(records, name)) for name in ("save", "plain", "stall", "pinned copy")}
    assert quantities == {"save": 6, "plain": 5, "stall": 5, "pinned copy": 5}


@pytest.mark.gpu
def test_a_save_on_an_accelerator_is_measured_beside_the_copy_of_the_driver():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "device_save", "--quick"],
        cwd=page.ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert re.search(r"\| save at once : copy \| \**\d", done.stdout), done.stdout
    assert "Not run" not in done.stdout and re.search(r"\| stall, overlap : at once \| -?\d", done.stdout), done.stdout
