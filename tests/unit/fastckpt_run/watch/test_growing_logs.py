"""Event logs that are read while they grow, are cut, are replaced, or whose storage does not answer."""

import os
import socket
import threading
from pathlib import Path

import pytest

from fastckpt._core import metrics
from fastckpt._core.report.events import FOLDER, Log, Name
from fastckpt._core.report.report import report
from fastckpt.errors import ConfigError
from fastckpt_run.watch import growing_logs
from fastckpt_run.watch.growing_logs import GrowingLog, LogReader, thinned
from tests.unit._core.report.stories import BOOT, Story


def line(name="uploaded", **fields):
    return metrics.to_line(metrics.stamp(name) | fields)


def steps(log):
    return [event["step"] for event in log.events if "step" in event]


@pytest.fixture
def log(tmp_path):
    return GrowingLog(tmp_path / "log")


def test_a_log_that_grows_is_read_on_and_its_last_line_when_it_is_whole(log):
    with open(log.path, "ab", buffering=0) as file:
        for step in range(3):
            file.write(line(step=step))
            log.grow()
            assert steps(log) == list(range(step + 1))
        torn = line(step=3)
        file.write(torn[:20])
        log.grow()
        assert steps(log) == [0, 1, 2] and not log.unreadable
        file.write(torn[20:] + b"no event\n")
        log.grow()
    assert steps(log) == [0, 1, 2, 3] and log.unreadable == 1


def test_a_log_that_was_cut_or_replaced_is_read_again(log):
    log.path.write_bytes(line(step=1) + line(step=2))
    log.grow()
    log.path.write_bytes(line(step=3))
    log.grow()
    assert steps(log) == [3]
    log.path.with_name("other").write_bytes(b"".join(line(step=step) for step in (4, 5, 6)))
    log.path.with_name("other").rename(log.path)
    log.grow()
    assert steps(log) == [4, 5, 6]


def test_a_line_without_an_end_fills_no_memory_and_a_pipe_is_not_waited_for(log, monkeypatch):
    monkeypatch.setattr(growing_logs, "LONGEST_LINE", 1000)
    log.path.write_bytes(b"x" * 5000)
    log.grow()
    assert not log.events and log.unreadable == 1 and len(log._rest) <= 1000
    log.path.unlink()
    os.mkfifo(log.path)
    with pytest.raises(ConfigError, match="no regular file"):
        log.grow()


def ranks(count, beat, **fields):
    told = {"step": 5, "named": 5, "loaded": -1, "phase": "", "restart_count": 0}
    return [
        {"local_rank": n, **told, "steps": n, "stalled": n / 10, "beat": BOOT + beat, **fields} for n in range(count)
    ]


def test_a_report_of_thinned_records_is_that_of_whole_ones():
    """Records in which ranks differ, and some are of the workers before."""
    story = Story(ranks=4).starts(0.5, 1.0, 1.5, 2.0).loads(2.5, 0.2)
    for second in range(3, 9):
        told = [*ranks(3, second, steps=4 * second), *ranks(1, second - 1, steps=4 * second + 3, stalled=0.3)]
        story.at(second, "progress", directory="/run", ranks=told, saves=second)
    story.dies(9.0).stops(9.2).starts(9.3, 9.5, 9.6, 9.8).loads(10.0, 0.1, step=5)
    told = [*ranks(3, 10.5, restart_count=1, loaded=5), *ranks(1, 8.5, local_rank=3, steps=99, stalled=9.0)]
    story.at(13.0, "progress", directory="/run", ranks=told, saves=10)
    events = story.finishes(14.0, 15.0).log.events
    thin = [thinned(event) for event in events]
    records = [event for event in thin if event["event"] == "progress"]
    assert [len(event["ranks"]) for event in records] == [1] * 6 + [2]
    assert report([Log(Path("log"), thin)]).lost == report([Log(Path("log"), events)]).lost
    assert report([Log(Path("log"), thin)]).steps == report([Log(Path("log"), events)]).steps


def write(directory, number, host, pid, *lines):
    (directory / FOLDER).mkdir(parents=True, exist_ok=True)
    path = directory / FOLDER / Name.new(number, host).to_text(pid)
    path.write_bytes(b"".join(lines))
    return path


def test_logs_of_earlier_launches_and_other_nodes_are_read_and_this_launch_from_memory(tmp_path):
    own = [line("job_started", run_id="now", host="here"), line(step=3)]
    reader = LogReader(own)
    assert [steps(log) for log in reader.read("", 10.0)] == [[3]] and not list(tmp_path.iterdir())
    write(tmp_path, 1, "before", 1, line(step=1))
    write(tmp_path, 2, socket.gethostname(), os.getpid(), *own[:1])  # ours, which lags behind
    other = write(tmp_path, 3, "there", 7, line(step=2))
    assert [steps(log) for log in reader.read(str(tmp_path), 10.0)] == [[1], [2], [3]]
    with open(other, "ab") as file:
        file.write(line(step=4))
    own.append(line(step=5))
    assert [steps(log) for log in reader.read(str(tmp_path), 10.0)] == [[1], [2, 4], [3, 5]]
    reader.forget()
    assert [steps(log) for log in reader.read(str(tmp_path), 10.0)] == [[1], [2, 4], [3, 5]]


def test_storage_that_hangs_keeps_no_reader_and_is_read_when_it_answers_again(tmp_path, monkeypatch):
    write(tmp_path, 1, "before", 1, line(step=1))
    own, answers, look = [line(step=3)], threading.Event(), growing_logs.in_folder

    def in_folder(folder):
        assert answers.wait(60)
        return look(folder)

    monkeypatch.setattr(growing_logs, "in_folder", in_folder)
    reader = LogReader(own)
    for _ in range(3):
        assert [steps(log) for log in reader.read(str(tmp_path), 0.01)] == [[3]]
        assert reader.asked > 0
    assert sum(thread.name == "fastckpt-logs" for thread in threading.enumerate()) == 1
    reader.forget()  # nobody looks any more: that waits for nothing either
    answers.set()
    assert [steps(log) for log in reader.read(str(tmp_path), 60.0)] == [[1], [3]]
    assert reader.asked == 0


def test_a_folder_that_cannot_be_read_is_told_and_the_job_is_shown(tmp_path):
    (tmp_path / FOLDER).parent.mkdir()
    (tmp_path / FOLDER).write_text("no folder")
    reader = LogReader([line(step=3)])
    assert [steps(log) for log in reader.read(str(tmp_path), 10.0)] == [[3]]
    assert "Not a directory" in reader.trouble
