"""Event logs that are read while they grow, are cut, are replaced, or whose storage does not answer."""

import os
import socket
import threading

import pytest

from fastckpt._core import metrics
from fastckpt._core.report.events import FOLDER, Name
from fastckpt.errors import ConfigError
from fastckpt_run.watch import growing_logs
from fastckpt_run.watch.growing_logs import GrowingLog, LogReader


def line(name="uploaded", **fields):
    return metrics.to_line(metrics.stamp(name) | fields)


def steps(log):
    return [event["step"] for event in log.events if "step" in event]


@pytest.fixture
def log(tmp_path):
    return GrowingLog(tmp_path / "log")


def test_a_log_is_read_on_as_it_grows_and_again_if_it_was_cut_or_replaced(log, monkeypatch):
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
    log.path.write_bytes(line(step=1) + line(step=2))
    log.grow()
    log.path.write_bytes(line(step=3))
    log.grow()
    assert steps(log) == [3]
    log.path.with_name("other").write_bytes(b"".join(line(step=step) for step in (4, 5, 6)))
    log.path.with_name("other").rename(log.path)
    log.grow()
    assert steps(log) == [4, 5, 6]
    monkeypatch.setattr(growing_logs, "LONGEST_LINE", 1000)
    log = GrowingLog(log.path.with_name("endless"))
    log.path.write_bytes(b"x" * 5000)
    log.grow()
    assert not log.events and log.unreadable == 1 and len(log._rest) <= 1000
    log.path.unlink()
    os.mkfifo(log.path)
    with pytest.raises(ConfigError, match="no regular file"):
        log.grow()


def write(directory, number, host, pid, *lines):
    (directory / FOLDER).mkdir(parents=True, exist_ok=True)
    path = directory / FOLDER / Name.new(number, host).to_text(pid)
    path.write_bytes(b"".join(lines))
    return path


def test_logs_of_other_launches_and_nodes_are_read_and_this_launch_from_memory(tmp_path):
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

    broken = tmp_path / "broken"
    (broken / FOLDER).parent.mkdir(parents=True)
    (broken / FOLDER).write_text("no folder")
    reader = LogReader([line(step=3)])
    assert [steps(log) for log in reader.read(str(broken), 10.0)] == [[3]]
    assert "Not a directory" in reader.trouble


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
