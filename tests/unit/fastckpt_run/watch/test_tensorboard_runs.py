"""Curves for TensorBoard on disks that fail: nobody waits, and what can be written is read by its own reader."""

import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastckpt.errors import ConfigError
from fastckpt_run.watch import tensorboard_runs
from fastckpt_run.watch.metric_values import MetricValues
from fastckpt_run.watch.tensorboard_runs import TensorBoardRuns
from tests.support.small_disks import leave, mounted, unmount
from tests.support.waits import DEADLINE, until


def values(step: int) -> MetricValues:
    found = MetricValues()
    found.add("step", step)
    return found


def points(run: Path) -> list[tuple[int, float]]:
    reader = EventAccumulator(str(run))
    reader.Reload()
    scalars = reader.Scalars("job/step") if "job/step" in reader.Tags()["scalars"] else []
    return [(point.step, point.value) for point in scalars]


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(tensorboard_runs, "PAUSE", 0.05)
    monkeypatch.setattr(tensorboard_runs, "CLOSING", DEADLINE)


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    path = mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=512k", "tmpfs")
    yield path
    unmount(path)


def test_on_a_full_disk_points_are_lost_and_curves_go_on_when_there_is_space(disk, caplog, capfd):
    runs = TensorBoardRuns(str(disk / "runs"))
    runs.begin()
    runs.put(10, 0, values(10), now=True)
    until(lambda: any(points(run) == [(10, 10)] for run in (disk / "runs").glob("*/start0")))
    [run] = (disk / "runs").glob("*/start0")
    ballast = leave(disk, 0)
    with caplog.at_level(logging.WARNING, "fastckpt.launcher"):
        for step in range(20, 40):
            runs.put(step, 0, values(step), now=True)  # returns at once
        until(lambda: "metrics for TensorBoard are lost" in caplog.text and not runs._points)
        assert runs._thread.is_alive()
    ballast.unlink()
    runs.put(50, 0, values(50), now=True)
    until(lambda: points(run)[-1:] == [(50, 50)])
    runs.close()
    assert not runs._thread.is_alive() and caplog.text.count("are lost") == 1
    assert points(run)[0] == (10, 10)
    assert "Traceback" not in capfd.readouterr().err


def test_a_disk_that_hangs_keeps_nobody_and_only_the_newest_points_wait(tmp_path, monkeypatch):
    hangs, begun = threading.Event(), threading.Event()

    def hang(folder: Path) -> None:
        begun.set()
        hangs.wait(DEADLINE)

    monkeypatch.setattr(tensorboard_runs, "_require_space", hang)
    monkeypatch.setattr(tensorboard_runs, "CLOSING", 0.05)
    runs = TensorBoardRuns(str(tmp_path))
    runs.begin()
    runs.put(0, 0, values(0), now=True)
    assert begun.wait(DEADLINE)
    for step in range(1, 100):
        runs.put(step, 0, values(step), now=True)
    assert [point[0] for point in runs._points] == [*range(100 - tensorboard_runs.WAITING, 100)]
    runs.close()  # returns though the disk does not
    assert runs._thread.is_alive()
    hangs.set()
    runs._thread.join(DEADLINE)
    assert not runs._thread.is_alive()


def test_without_the_package_the_launch_fails_at_once_and_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    remedy = r"pip install 'tensorboard>=2\.16' \(--fast-tensorboard, FASTCKPT_TENSORBOARD\)"
    with pytest.raises(ConfigError, match=f"tensorboard is 'runs', but the package tensorboard is not .*{remedy}"):
        TensorBoardRuns("runs").begin()
