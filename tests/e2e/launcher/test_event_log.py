"""The event log beside the checkpoints: no process waits for it, whatever its storage does."""

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.run import config_from_args, get_args_parser

from fastckpt._core import metrics
from fastckpt._core.report.events import FOLDER, find, read
from fastckpt._core.saver.server import Saver
from fastckpt_run.events import log_file, recorder
from fastckpt_run.events.log_file import EventLog
from fastckpt_run.events.recorder import EventRecorder, _name_of
from fastckpt_run.workers import run_script_path
from tests.support.small_disks import mounted, unmount
from tests.support.tables import for_each
from tests.support.waits import until

UMASK = os.umask(0)
os.umask(UMASK)


def line(number: int, padding: str = "") -> bytes:
    return metrics.to_line(metrics.stamp("uploaded") | {"step": number, "padding": padding})


def steps(path: Path) -> list[int]:
    log = read(path)
    assert not log.unreadable
    return [event["step"] for event in log.events if event["event"] == "uploaded"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "run/.fastckpt").mkdir(parents=True, mode=0o700)
    return tmp_path / "run"


def test_events_from_before_and_after_the_log_opens_are_written_in_order(directory: Path) -> None:
    log = EventLog(directory, [line(0), line(1)])
    for number in range(2, 500):
        log.append(line(number))
        if number == 5:  # it is there at once, for whoever kills the agent then
            until(lambda: [s for p in directory.glob(f"{FOLDER}/*") for s in steps(p)][-1:] == [5], "the line")
    assert log.close(30)
    [path] = find(str(directory))
    assert steps(path) == list(range(500))
    assert [stat.S_IMODE(found.stat().st_mode) for found in (path, path.parent)] == [0o666 & ~UMASK, 0o777 & ~UMASK]


def test_each_launch_has_a_log_and_the_oldest_logs_are_deleted(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "KEPT", 3)
    (directory / FOLDER).mkdir()
    (directory / FOLDER / "notes.txt").write_text("a user's own")
    for number in range(5):
        (directory / FOLDER / f"00000{number}-other-host-7.jsonl").write_bytes(line(100 + number))
    for number in range(5):
        assert EventLog(directory, [line(number)]).close(30)
    theirs = [[100], [101], [102], [103], [104]]
    assert [steps(path) for path in find(str(directory))] == [*theirs, [2], [3], [4]]
    assert (directory / FOLDER / "notes.txt").exists()


@contextmanager
def disk(path: Path, *arguments: Any) -> Iterator[Path]:
    """A checkpoint directory that is a file system of its own."""
    mounted(path, *arguments)
    try:
        (path / ".fastckpt").mkdir()
        yield path
    finally:
        subprocess.run(["fsfreeze", "-u", str(path)], capture_output=True, check=False)
        unmount(path)


def test_on_a_full_disk_the_oldest_events_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system of 64 kB, of which lines may wait at once for as much."""
    monkeypatch.setattr(log_file, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(log_file, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(log_file, "WAITING", 1 << 16)
    with disk(tmp_path / "disk", "-t", "tmpfs", "-o", "size=64k", "tmpfs") as small:
        (small / "ballast").write_bytes(bytes(1 << 15))
        log = EventLog(small, [])
        lost = metrics.counts["events_lost"]
        for number in range(200):
            log.append(line(number, "p" * 900))
        until(lambda: metrics.counts["events_lost"] > lost, "the loss")
        (small / "ballast").unlink()
        subprocess.run(["mount", "-o", "remount,size=1m", str(small)], check=True)
        log.append(line(200))
        assert log.close(30)
        [path] = find(str(small))
        told = read(path)
        there = steps(path)
    assert not told.unreadable, "a line that was written in part was completed"
    gaps = [event["count"] for event in told.events if event["event"] == "events_lost"]
    assert there[-1] == 200 and gaps and len(there) + sum(gaps) == 201
    assert metrics.counts["events_lost"] - lost == sum(gaps)


def test_an_event_log_on_a_frozen_file_system_delays_nobody(tmp_path: Path) -> None:
    """As the kernel lets it: what writes to it sleeps, and hears no signal."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with disk(tmp_path / "device", "-o", "loop", image) as device:
        log = EventLog(device, [line(0)])
        until(lambda: any(steps(path) for path in device.glob(f"{FOLDER}/*")), "the first line")
        subprocess.run(["fsfreeze", "-f", str(device)], check=True)
        for number in range(1, 1000):
            log.append(line(number))
        assert not log.close(0.1)
        subprocess.run(["fsfreeze", "-u", str(device)], check=True)
        assert log.close(30)
        [path] = find(str(device))
        assert steps(path) == list(range(1000))


def test_the_event_log_follows_no_symbolic_link_and_does_not_recreate_a_removed_directory(
    directory: Path, tmp_path: Path
) -> None:
    target = tmp_path / "precious"
    target.write_text("as it was")
    log = EventLog(directory, [])
    (directory / FOLDER).mkdir()
    log._path = directory / FOLDER / "000001-host-1.jsonl"
    log._path.symlink_to(target)
    log.append(line(0))
    assert not log.close(30)
    assert target.read_text() == "as it was"
    shutil.rmtree(directory)
    assert not EventLog(directory, [line(0)]).close(30)
    assert not directory.exists()


def test_lines_of_the_event_log_are_whole_after_short_writes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    assert EventLog(directory, [line(number) for number in range(20)]).close(30)
    monkeypatch.undo()
    [path] = find(str(directory))
    assert steps(path) == list(range(20))
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == list(range(20))


@for_each(
    (["--no-python", "/opt/train", "--token", "secret"], "train"),
    (["--no-python", "/usr/bin/python3", "/data/train.py", "secret"], "train.py"),
    (["-m", "pkg.train", "secret"], "pkg.train"),
    (["--run-path", "/data/train.py", "secret"], "train.py"),
)
def test_the_name_of_a_job_contains_no_argument_of_its_script(arguments: list[str], name: str) -> None:
    arguments = ["--log-dir", os.environ["TMPDIR"], *arguments]
    _, program, rest = config_from_args(get_args_parser().parse_args(arguments))
    program = run_script_path if callable(program) else program  # as the agent replaces torch's
    assert _name_of(WorkerSpec("", 1, None, entrypoint=program, args=tuple(rest))) == name


def test_events_that_account_for_time_are_never_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of restarts of many workers come to more than what is kept of any other event."""
    monkeypatch.setattr(recorder, "MOST", 3)
    told = EventRecorder(cast("Saver", None), keep=False)
    for name in ("worker_joined", "skipped"):
        for _ in range(5):
            told._record(metrics.stamp(name))
    assert [json.loads(line)["event"] for line in told.lines] == ["worker_joined"] * 5 + ["skipped"] * 3
