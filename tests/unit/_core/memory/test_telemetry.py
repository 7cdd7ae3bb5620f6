"""The telemetry block: progress of each worker, readable after its death."""

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastckpt._core.memory.telemetry import (
    LINE,
    PLACES,
    STEP_BOUNDS,
    Line,
    StepWindow,
    Telemetry,
    TelemetryBlock,
    telemetry_name,
    unlink,
)
from fastckpt.errors import FastckptError


@pytest.fixture
def block():
    name = telemetry_name(Path(os.environ["FASTCKPT_SHM_DIR"]) / "arena")
    block = TelemetryBlock(name, 3)
    yield block
    block.close()
    unlink(name)


def test_a_telemetry_line_is_readable_in_any_phase(block: TelemetryBlock):
    line = block.line(1)
    for step, phase in ((-1, ""), (2**63 - 1, "x" * 44), (0, "ä" * 30), (5, "y" * 100)):
        line.at(step)
        line.enter(phase)
        assert block.read(1).step == step
        assert phase.startswith(block.read(1).phase.rstrip("\ufffd"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The monotonic clock, in nanoseconds, as a test sets it."""
    now = [10**9]
    monkeypatch.setattr("fastckpt._core.memory.telemetry.time.monotonic_ns", lambda: now[0])
    return now


def test_a_step_is_counted_below_the_first_bound_that_it_does_not_exceed(block, clock):
    line = block.line(0)
    took = (1, 10**6, 10**6 + 1, 2 * 10**6, 2 * 10**6 + 1, 10**12, 10**13)
    for start, (nanoseconds, bucket) in enumerate(zip(took, (0, 0, 1, 1, 2, 20, 21), strict=True)):
        line.begin(start, 1, 0)
        line.step()
        assert (sum(block.read(0).durations), block.read(0).stepping) == (0, 0), "the first one has no beginning"
        clock[0] += nanoseconds
        line.step()
        assert block.read(0).durations == tuple(place == bucket for place in range(len(STEP_BOUNDS) + 1))
        assert block.read(0).stepping == nanoseconds
        assert bucket == len(STEP_BOUNDS) or nanoseconds <= STEP_BOUNDS[bucket] * 1e9


def test_the_time_of_a_phase_is_not_that_of_the_step_around_it(block, clock):
    line = block.line(0)
    line.begin(0, 1, 0)
    line.step()
    for name, seconds in (("save", 5), ("snapshot.fill", 5), ("", 1), ("evaluation", 7), ("", 1)):
        line.enter(name)
        clock[0] += seconds * 10**9
    line.step()
    assert block.read(0).stepping == 2 * 10**9
    line.enter("the script marks its whole loop")
    for _ in range(2):
        clock[0] += 10**9
        line.step()
    assert block.read(0).stepping == 4 * 10**9, "in which steps are taken all the same"


def test_the_newest_windows_and_the_sums_of_parts_of_steps_are_readable_until_the_next_start(block):
    line = block.line(1)
    line.begin(0, 1, 0)
    line.spend((1, 2, 3, 4, 5))
    line.spend((10, 0, 0, 0, 10**15))
    assert block.read(1).parts == (11, 2, 3, 4, 10**15 + 5)
    windows = [StepWindow(number, (number, 2, 3, 4, 5), 10 + number) for number in range(1, PLACES + 6)]
    for count, window in enumerate(windows, 1):
        line.close_window(window)
        assert block.windows(1) == windows[max(0, count - PLACES) : count]
    assert block.windows(0) == block.windows(2) == []
    line.begin(1, 1, 0)
    assert (block.windows(1), block.read(1).parts) == ([], (0,) * 5)


@contextmanager
def writing(block: TelemetryBlock, write: Callable[[Line, int], object]) -> Iterator[None]:
    """While another process writes to the first line, which is killed in the middle."""

    def go_on() -> None:
        line = TelemetryBlock(block.name).line(0)
        for number in itertools.count(1):
            write(line, number)

    writer = multiprocessing.get_context("fork").Process(target=go_on)
    writer.start()
    try:
        yield
    finally:
        writer.kill()
        writer.join()
        writer.close()


def test_telemetry_is_read_consistently_while_it_is_written(block: TelemetryBlock):
    with writing(block, lambda line, number: line.close_window(StepWindow(number, (number,) * 5, number))):
        while not block.windows(0):
            pass
        found = [window for _ in range(1000) for window in block.windows(0)]
    assert len(found) > 1000 and all(window.parts == (window.number,) * 5 for window in found)
    assert all(window.own == window.number for window in found)
    with writing(block, lambda line, number: line.enter("ab"[number % 2] * 40, number % 2)):
        while not block.read(0).phase:
            pass
        pairs = {(line.phase, line.allowed) for line in (block.read(0) for _ in range(20000))}
    assert pairs == {("a" * 40, 0), ("b" * 40, 1)}
    assert block.read(0).phase in ("a" * 40, "b" * 40), "also when its writer died in the middle"


def test_a_stale_telemetry_block_is_replaced_and_a_missing_or_empty_one_an_error(block: TelemetryBlock):
    block.line(0).enter("old")
    new = TelemetryBlock(block.name, 1)
    assert (new.read(0), block.read(0).phase) == (Telemetry(), "old")
    new.close()
    status = Path("/dev/shm", block.name.strip("/")).stat()
    assert (status.st_size, status.st_mode & 0o777) == (LINE, 0o600)
    with pytest.raises(FastckptError, match="no line 3"):
        block.line(3)
    os.truncate(Path("/dev/shm", block.name.strip("/")), 0)
    for name in (block.name, f"{block.name}-nowhere"):
        with pytest.raises(FastckptError, match=name):
            TelemetryBlock(name)
