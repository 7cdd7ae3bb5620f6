"""Threads that share a rate limit write no faster than it allows, and no slower; a directory's rate is measured."""

import math
import os
import threading
import time
from pathlib import Path

import pytest

from fastckpt._core.config import Settings
from fastckpt._core.io import write_rate as module
from fastckpt._core.io.copier import Copier
from fastckpt._core.io.direct import BLOCK
from fastckpt._core.io.rate import LeakyBucket, RateLimit
from fastckpt._core.io.write_rate import write_rate
from fastckpt.errors import ConfigError
from tests.support.tables import for_each

MiB = 2**20


@for_each(
    ([(0, 100), (0, 100), (0, 100)], [0, 1, 2]),  # the first goes at once, the others when all before are paid for
    ([(0, 100), (0.4, 100)], [0, 0.6]),
    ([(0, 100), (1, 100), (2, 100)], [0, 0, 0]),  # who writes just as fast never waits
    ([(0, 100), (50, 100), (50, 100)], [0, 0, 1]),  # a pause is not saved up
    ([(0, 1000), (0, 1), (9, 1)], [0, 10, 1.01]),  # a large portion is paid for by those after it
    ([(0, 0), (0, 0), (0, 100), (0, 0)], [0, 0, 0, 1]),  # nothing costs nothing
    ([(7e9, 50), (7e9, 50)], [0, 0.5]),  # clocks begin anywhere
)
def test_a_limit_of_100_bytes_per_second_schedules_writes(asked, waits):
    schedule = LeakyBucket(100)
    assert (RateLimit(100e6).portion, RateLimit(1000).portion) == (10_000_000, MiB)
    assert [schedule.reserve(count, now) for now, count in asked] == pytest.approx(waits)


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"source-{i}" for i in range(3)]
    for path in paths:
        path.write_bytes(os.urandom(2 * MiB))
    return paths


def test_files_and_consecutive_persists_share_one_limit(tmp_path, sources):
    """A limit can only be too slow on a busy machine, so a bound from below always holds."""
    copier = Copier(mbps=32 * MiB / 1e6)
    start = time.monotonic()
    for again in (1, 2):
        copier.each(lambda copy, path, again=again: copy.file(path, tmp_path / f"{again}-{path.name}"), sources)
    assert time.monotonic() - start > (12 - 2 * 2) / 32  # all but the last portions are paid for
    assert all((tmp_path / f"2-{path.name}").read_bytes() == path.read_bytes() for path in sources)


def test_one_failed_copy_stops_the_others_is_raised_and_no_further_file_is_begun(tmp_path, sources):
    """Even one that waits for its turn under a limit at which it would take hours."""
    started, begun = threading.Barrier(3), []

    def work(copy, path):
        begun.append(path)
        if path == sources[2]:
            started.wait(60)
            raise OSError(28, "No space left on device")
        started.wait(60)
        return copy.file(path, tmp_path / f"target-{path.name}")

    with pytest.raises(OSError, match="No space left"):
        Copier(mbps=0.001, files_at_once=3).each(work, [*sources, Path("further")])
    assert {*begun} == {*sources} and not list(tmp_path.glob("target-*"))
    barrier, delays = threading.Barrier(3), [0.1, 0, 0.05]  # nobody passes alone; results are in the order of items
    at_once = Copier(files_at_once=3).each(lambda _, delay: (barrier.wait(60), time.sleep(delay), delay)[2], delays)
    assert at_once == delays and Copier().each(work, []) == []


@for_each(
    ("persist_mbps", [-1.0, math.nan, math.inf], "give MB per second"),
    ("replica_mbps", [-1.0, 0.5, 1e305, math.nan, math.inf], "give 1 MB per second or more"),
)
def test_a_rate_limit_comes_from_the_environment_and_an_invalid_one_is_refused(setting, values, least):
    for value in values:
        with pytest.raises(ConfigError, match=f"{setting} is .*; {least}, or 0 for no limit"):
            Settings(**{setting: value})
    assert getattr(Settings(), setting) == 0
    assert getattr(Settings.from_environment({f"FASTCKPT_{setting.upper()}": "1e9"}), setting) == 1e9


@pytest.mark.parametrize("is_named", [False, True])
def test_writes_have_a_rate_and_leave_nothing(tmp_path: Path, monkeypatch, is_named: bool):
    """A file with a name where the file system has no nameless ones: asked for with a flag that none has."""
    if is_named:
        monkeypatch.setattr(module.os, "O_TMPFILE", module.os.O_DIRECTORY)
    for size in (1, 5000, BLOCK + 5000):
        assert write_rate(tmp_path, size) > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="none"):
        write_rate(tmp_path / "none", 5000)
