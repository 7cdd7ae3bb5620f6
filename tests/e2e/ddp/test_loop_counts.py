"""`fastckpt.Checkpointer` in loops that number steps in their own way, change their objects, or end at once."""

import gc
from typing import Any

from torch import nn

from fastckpt._core.client.collective import SingleRank
from fastckpt._core.policy.frequency.failures import mean_time_between
from fastckpt.checkpointer import save_frequency
from tests.e2e.ddp.conftest import on_storage
from tests.e2e.ddp.test_loop import Training, saves


def test_a_multiple_of_the_interval_that_is_skipped_is_saved_at_the_next_step(directory):
    training = Training(directory, every={"memory": 5, "storage": 10})
    with training.checkpointer as checkpointer:
        checkpointer.resume()
        assert saves(training, [1, 4, 6, 7, 9, 11, 14, 15, 16, 31]) == [6, 11, 15, 31]
    assert on_storage(directory)[-1] == 31


def test_the_save_of_the_last_step_waits_for_a_slot(directory, monkeypatch):
    monkeypatch.setenv("FASTCKPT_SLOTS", "2")
    monkeypatch.setenv("FASTCKPT_PERSIST_MBPS", "4")
    large = {"large": nn.Linear(512, 512)}  # 1 MB
    training = Training(directory, every=3, others=large)
    with training.checkpointer as checkpointer:
        checkpointer.resume()
        assert training.steps(1, 3)[-1] is True
        assert training.steps(4, 6)[-1] is True or checkpointer._writer.skipped
        training.steps(7, 8)
    assert on_storage(directory)[-1] == 8
    checkpointer.close()


def test_a_job_that_ends_before_memory_is_ready_logs_no_warning_of_it(directory, said):
    for attempt in range(4):
        with Training(directory / str(attempt), others={"large": nn.Linear(1500, 1500)}).checkpointer as checkpointer:
            checkpointer.resume()
        gc.collect()
    assert "never retrieved" not in said.text


class SecondRank(SingleRank):
    """An agreement with a first rank, whose agent has made other restarts."""

    life = ("launch", 3, [100.0, 2, "launch", 1])

    def gather(self, value: Any) -> list[Any]:
        given, _, *more = value if len(value) == 4 else (None, None)
        return [[given, self.life, *more], value] if more else [value, value]


def test_all_ranks_go_by_the_failures_that_the_first_one_knows_of(directory, monkeypatch):
    """Agents count their own restarts: ranks that went by these decided unlike, and waited for each other for ever."""
    monkeypatch.setattr(save_frequency, "agreement", lambda world, name: SecondRank())
    with Training(directory).checkpointer as checkpointer:
        checkpointer.resume()
        assert checkpointer._frequency._life.failures == 4
        assert checkpointer._frequency._life.mean_time_between_failures == mean_time_between(4, 100.0)
