"""The log line of a restart, whatever becomes of the workers; and tracebacks of failures in it."""

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fastckpt._core import metrics
from fastckpt_run.failures import restart_notice
from fastckpt_run.failures.cause import Cause, cause_of
from fastckpt_run.failures.restart_notice import ELSEWHERE, RestartNotice

PAGE = " (FC-030, docs/errors.md#fc-030)"
KILLED = {1: (-9, Cause())}
DIED = "rank 1 died: SIGKILL; "
REACHED = {"step": 44, "named": 44, "steps": 45}


class Told:
    """A notice for two workers with three restarts, and the lines that it has logged."""

    def __init__(self, log: pytest.LogCaptureFixture) -> None:
        self.notice = RestartNotice(3)
        self._log = log

    @property
    def lines(self) -> list[str]:
        return [re.sub(r"after \d+\.\d s", "after T", line) for line in self._log.messages]

    def start(self, *joined: int) -> None:
        metrics.event("rendezvous", seconds=0.0, node=0, nodes=1, world_size=2, ranks=[0, 1])
        metrics.event("workers_started", pids={0: 1, 1: 2}, restart_count=0, world_size=2, master_port=1)
        for rank in joined:
            metrics.event("worker_joined", directory="dir", local_rank=rank)

    def fail(self, left: int, *joined: int, first: str = "") -> None:
        metrics.event("worker_died", local_rank=1, rank=1, exitcode=-9)
        self.notice.failed(KILLED, left, nodes=2 if first else 1, first=first)
        ranks = [{"local_rank": each, "beat": time.monotonic(), **REACHED} for each in range(2)]
        metrics.event("progress", directory="dir", ranks=ranks, saves=1)
        metrics.event("workers_stopped", pids=[1, 2])
        if left:
            self.start(*joined)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Told]:
    caplog.set_level(logging.WARNING, "fastckpt.launcher")
    logging.getLogger("fastckpt").propagate = True
    told = Told(caplog)
    metrics.listen(told.notice.observe)
    yield told
    metrics.unlisten(told.notice.observe)


@pytest.mark.parametrize("joined", [(0, 1), ()], ids=["that load nothing", "without a checkpointer"])
def test_workers_that_load_nothing_have_a_restart_line(
    told: Told, joined: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    told.start(*joined)
    told.fail(3, *joined)
    told.notice.look(2)
    assert told.lines == []
    if joined:
        metrics.event("first_step", local_rank=0, rank=0)
    else:
        monkeypatch.setattr(restart_notice, "PATIENCE", 0.0)
    told.notice.look(2)
    told.notice.end()
    assert told.lines == [f"{DIED}restarted after T, 2 of 3 restarts left{PAGE}"]


def test_a_fresh_start_and_the_death_after_another_nodes_failure_are_in_the_restart_line(told: Told) -> None:
    told.start(0)
    told.fail(3, 0, 1, first=ELSEWHERE)
    for rank in (0, 1):
        metrics.event("started_fresh", directory="dir", local_rank=rank)
        told.notice.look(2)
        assert len(told.lines) == rank, "once all have loaded"
    how = "started fresh, as there was nothing to resume, after T, "
    assert re.match(rf"{ELSEWHERE}; then rank 1 died on [^ ]+: SIGKILL; {how}", told.lines[0])


def test_each_restart_and_the_final_failure_have_a_line(told: Told) -> None:
    told.start()
    told.fail(2)
    told.fail(1)
    told.fail(0)
    told.notice.end()
    again = f"{DIED}restarted after T, but the workers failed again before they had loaded anything"
    *restarts, lost = told.lines
    assert restarts == [f"{again}, {left} of 3 restarts left{PAGE}" for left in (1, 0)]
    assert re.fullmatch(r"rank 1 died: SIGKILL; not restarted \(on [^ ,]+\) \(FC-027, docs/errors.md#fc-027\)", lost)


def test_a_restart_after_a_hang_and_several_deaths_names_them_also_if_the_job_ends_before_it(told: Told) -> None:
    told.start()
    ranks = [{"rank": 1, "place": "take (data.py:88)"}]
    metrics.event("hang", culprits=[1], reason="r", silent=61.5, ranks=ranks)
    told.notice.failed({rank: (-9, Cause()) for rank in range(1, 6)}, 1, nodes=1, first="")
    told.notice.end()
    deaths = "rank 1 hung for 61.5 s in take (data.py:88); rank 2 died: SIGKILL; rank 3 died: SIGKILL and 2 more"
    assert told.lines == [f"{deaths}; the job ended before they were started again, 0 of 3 restarts left{PAGE}"]


TRACEBACK = """\
noise
Traceback (most recent call last):
  File "/a/b/train.py", line 90, in <module>
    main()
  File "/a/b/train.py", line 57, in step
    raise ValueError("bad\\x1b[31m")
ValueError: bad\x1b[31m
more of the message
"""
WHY = Cause("ValueError: bad [31m", "step (train.py:57)")


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (TRACEBACK, WHY),
        ("".join(f"[rank3]: {line}\n" for line in TRACEBACK.splitlines()), WHY),  # torch does so in a process group
        (f"{TRACEBACK}\nDuring\n\n{TRACEBACK.replace('57', '58')}", Cause(WHY.exception, "step (train.py:58)")),
        (TRACEBACK.replace("ValueError: ", f'  File "{torch.__file__}", line 1, in deep\nValueError: '), WHY),
        ("usage: x\nerror: no\n", Cause()),
        ("", Cause()),
    ],
    ids=["plain", "ranked", "chained", "library", "none", "empty"],
)
def test_the_restart_line_has_the_exception_and_its_frame(words: str, cause: Cause, tmp_path: Path) -> None:
    failure = ProcessFailure(0, 1, 1, "")
    assert cause_of(failure, words, None) == cause
    log = tmp_path / "stderr.log"
    log.write_text(words)
    workers = SimpleNamespace(stderrs={0: str(log)})
    assert cause_of(failure, "", workers) == Cause(cause.exception, cause.frame, str(log))
    assert cause_of(ProcessFailure(0, 1, -9, ""), "", workers) == Cause(log=str(log)), "not an older traceback"
