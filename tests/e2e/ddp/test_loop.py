"""`fastckpt.Checkpointer`, alone in this process."""

import gc
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastckpt import Checkpointer
from fastckpt._core import metrics
from fastckpt._core.client.collective import SingleRank
from fastckpt._core.policy.frequency.failures import mean_time_between
from fastckpt._core.snapshot import mutation_check
from fastckpt.checkpointer import save_frequency
from fastckpt.checkpointer.gradients import Gradients
from fastckpt.data import ResumableDataLoader
from fastckpt.ddp import (
    DdpCheckpointer,
    KeepBestStrategy,
    KeepLatestStepStrategy,
    KeepStepIntervalStrategy,
    StorageType,
)
from fastckpt.errors import BadCheckpoint, ConfigError, FastckptError
from tests.e2e.ddp.conftest import on_storage
from tests.e2e.ddp.overlapping import Held


class Training:
    """A model and what trains it; the same at every start."""

    def __init__(self, directory: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.checkpointer = Checkpointer(directory, **parts | options)

    @contextmanager
    def resumed(self, after: int = 0, /, **options: Any) -> Iterator[Checkpointer]:
        """The checkpointer, which resumes at this step and is closed at the end."""
        with self.checkpointer as checkpointer:
            assert checkpointer.resume(**options) == after
            yield checkpointer

    def steps(self, first: int, last: int) -> list[bool | None]:
        """What became of each step's save; None if none was due."""
        found = []
        for step in range(first, last + 1):
            self.model(torch.ones(8) * step).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            result = self.checkpointer.step(step)
            found.append(result if result is None else result.saved)
        return found

    def until_known(self, step: int) -> int:
        """Train on after a step until its profile is complete, however long the disk takes; the last step."""
        while self.checkpointer._frequency.schedule.known is None:
            time.sleep(0.005)
            step += 1
            self.steps(step, step)
        return step

    def weights(self) -> list[Any]:
        states = self.model.state_dict(), self.optimizer.state_dict()["state"]
        return [*states[0].values(), *(value for part in states[1].values() for value in part.values())]


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_last_step_is_durable_even_if_its_background_copy_was_lost(directory, monkeypatch):
    """Averaged weights were swapped in for an evaluation, while those of the step were being copied."""
    monkeypatch.setattr(mutation_check, "WORTH", 1)
    training = Training(directory, every={"memory": 1, "storage": 3})
    with training.resumed() as checkpointer, Held():
        assert training.steps(1, 3) == [True] * 3
        own = [parameter.detach().clone() for parameter in training.model.parameters()]
        with torch.no_grad():
            torch._foreach_zero_(list(training.model.parameters()))
            checkpointer._writer.be_ready()
            torch._foreach_copy_(list(training.model.parameters()), own)
    assert on_storage(directory)[-1] == 3
    assert same(own, torch.load(directory / "checkpoint-3" / "model.pt")["model"].values())


def test_fixed_intervals_are_multiples_and_the_last_step_is_durable(directory):
    training = Training(directory, every={"memory": 2, "storage": 4})
    with training.resumed():
        assert training.steps(1, 9) == [None, True, None, True, None, True, None, True, None]
    assert on_storage(directory)[-1] == 9
    assert on_storage(directory)[0] in (4, 8)

    again = Training(directory, every=3)
    with again.resumed(9) as checkpointer:
        assert same(training.weights(), again.weights())
        assert again.scheduler.state_dict() == training.scheduler.state_dict()
        assert again.steps(10, 12) == [None, None, True]
        again.steps(13, 14)
        assert checkpointer.resume() == 12, "a second resume loads the newest, and counts from there"
        assert again.steps(13, 15) == [None, None, True]
    with pytest.raises(FastckptError, match=r"closed: nothing is saved or loaded after close\(\); make another"):
        checkpointer.step(16)
    never = Training(directory, deletion_strategy=KeepLatestStepStrategy(1, directory)).checkpointer
    with pytest.raises(FastckptError, match=r"call resume\(\)"), never as checkpointer:
        checkpointer.step(1)


def test_a_multiple_of_the_interval_that_is_skipped_is_saved_at_the_next_step(directory):
    training = Training(directory, every={"memory": 5, "storage": 10})
    with training.resumed():
        steps = [1, 4, 6, 7, 9, 11, 14, 15, 16, 31]
        assert [step for step in steps if training.steps(step, step) == [True]] == [6, 11, 15, 31]
    assert on_storage(directory)[-1] == 31


def test_the_save_of_the_last_step_waits_for_a_slot(directory, monkeypatch):
    monkeypatch.setenv("FASTCKPT_SLOTS", "2")
    monkeypatch.setenv("FASTCKPT_PERSIST_MBPS", "4")
    training = Training(directory, every=3, others={"large": nn.Linear(512, 512)})  # 1 MB
    with training.resumed() as checkpointer:
        assert training.steps(1, 3)[-1] is True
        assert training.steps(4, 6)[-1] is True or checkpointer._writer.skipped
        training.steps(7, 8)
    assert on_storage(directory)[-1] == 8
    checkpointer.close()


def test_a_job_that_ends_before_memory_is_ready_logs_no_warning_of_it(directory, said):
    for attempt in range(4):
        with Training(directory / str(attempt), others={"large": nn.Linear(1500, 1500)}).resumed():
            pass
        gc.collect()
    assert "never retrieved" not in said.text


def test_a_resume_of_an_earlier_step_begins_a_history_that_later_resumes_go_on_from(directory):
    kept = {"every": 1, "deletion_strategy": KeepStepIntervalStrategy(2, directory)}
    first = Training(directory, **kept)
    with first.resumed() as checkpointer:
        for step in range(1, 9):
            first.steps(step, step)
            checkpointer._checkpointer.wait_latest_checkpoint(60)
            if step == 4:
                before = [weight.clone() for weight in first.weights()]
    second = Training(directory, **kept)
    with second.checkpointer as checkpointer:
        with pytest.raises(BadCheckpoint, match=r"checkpoint-5 cannot be loaded.* fastckpt ls .* shows what there is"):
            checkpointer.resume(step=5)
        with pytest.raises(ConfigError, match=r"step is '4'.*give int\(step\)"):
            checkpointer.resume(step="4")
        assert checkpointer.resume(step=4) == 4
        assert same(before, second.weights())
        second.steps(5, 6)
    third = Training(directory, **kept)
    with third.resumed(6):  # not step 8, which is older than what was saved after going back
        assert same(second.weights(), third.weights())
    assert 8 in on_storage(directory), "what was left is still there"


def test_a_step_with_metrics_is_durable_though_none_is_due_and_the_best_is_kept(directory):
    training = Training(directory, every=1000, deletion_strategy=KeepBestStrategy(1, "loss", directory))
    with training.resumed() as checkpointer:
        for step, loss in enumerate([3.0, 1.0, 2.0, None, 4.0], 1):
            training.model(torch.ones(8) * step).square().sum().backward()
            training.optimizer.step()
            result = checkpointer.step(step, None if loss is None else {"loss": loss})
            assert (result is not None) == (loss is not None)
            checkpointer._checkpointer.wait_latest_checkpoint(60)
    assert on_storage(directory) == [2, 5]


def test_the_profile_and_the_chosen_frequency_are_known_after_a_resume(directory):
    first = Training(directory)
    with first.resumed() as checkpointer:
        saves = first.steps(1, 40)
        assert saves[0] is True, "the first step is saved before anything is known"
        assert None in saves, "iterations with a save are compared with iterations without"
        assert checkpointer._frequency.schedule.known is None, "50 are profiled"
        last = first.until_known(40)
        known = checkpointer._frequency.schedule.known
    second = Training(directory)
    with second.resumed(last) as checkpointer:
        assert checkpointer._frequency.schedule.known.profile == known.profile
        begin, last = last + 1, last + 1 + known.intervals.storage
        assert any(second.steps(begin, last))
    with Training(directory, overhead=0.5).resumed(last) as checkpointer:
        assert checkpointer._frequency.schedule.known.intervals is None, "those were for another overhead"
    timed = Training(directory / "timed", every={"memory": 1, "storage": timedelta(hours=1)})
    with timed.resumed() as checkpointer:
        timed.until_known(0)
        intervals = checkpointer._frequency.schedule.known.intervals
        assert intervals.memory == 1 and intervals.storage > 1000
    begun = Training(directory / "begun")
    with begun.resumed():
        begun.steps(1, 30)
    with Training(directory / "begun").resumed(30) as checkpointer:
        before = checkpointer._frequency.schedule._profiler.progress
        assert before is not None and before.snapshots and before.iterations < 50, (
            "a run goes on with the profile of the one before"
        )


def test_objects_missing_in_a_checkpoint_are_reported(directory, said):
    first = Training(directory, every=1, others={"average": nn.Linear(1, 1)})
    with first.resumed():
        first.steps(1, 1)
    with Training(directory, scheduler=()).resumed(1):
        assert "the checkpoint has average, scheduler, which no part takes" in said.text
    with DdpCheckpointer(directory) as manual:
        assert manual.load_checkpoint().keys() >= {"model", "optimizer", "scheduler", "average"}
        manual.save_checkpoint(7, {"model": first.model.state_dict()}, storage_type=StorageType.DISK)
    with Training(directory, optimizer=(), scheduler=()).resumed(7):
        pass  # what was saved by hand


@pytest.mark.parametrize("gradients", [True, False])
def test_gradients_in_the_middle_of_accumulation_are_saved_and_resumed(directory, gradients, said):
    def micro_batches(training: Training, first: int, last: int) -> None:
        for step in range(first, last + 1):
            training.model(torch.ones(8) * step).square().sum().backward()
            if step % 3 == 0:
                training.optimizer.step()
                training.optimizer.zero_grad()
            training.checkpointer.step(step)

    whole = Training(directory / "whole", every=100)
    with whole.resumed():
        micro_batches(whole, 1, 9)
    for begin, end in ((0, 3), (3, 5), (5, 9)):
        training = Training(directory, every=1, gradients=gradients)
        for parameter in training.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        training.optimizer.zero_grad(set_to_none=begin > 0)
        with training.resumed(begin):
            grads = [parameter.grad is not None for parameter in training.model.parameters()]
            assert grads == [begin == 0 or (gradients and begin == 5)] * 2
            micro_batches(training, begin + 1, end)
    assert same(training.weights(), whole.weights()) is gradients
    assert ("in the middle of accumulation, without the gradients" in said.text) is not gradients


def test_after_an_error_in_the_loop_nothing_more_is_saved_and_all_is_closed(directory):
    for in_the_loop in (False, True):
        other = nn.Linear(1, 1)
        training = Training(directory, every=10, others={"other": other})
        with pytest.raises(ZeroDivisionError), training.resumed():
            training.steps(1, 3)
            other.register_state_dict_post_hook(lambda *_: 1 // 0)
            if in_the_loop:
                other.state_dict()
        assert on_storage(directory) == []
    Training(directory).checkpointer.close()


def test_invalid_arguments_of_the_loop_are_refused_at_once(directory):
    for options, says in (
        ({"scheduler": [object()]}, "scheduler is an object"),
        ({"scheduler": None}, "scheduler is None"),
        ({"others": []}, "others is a list"),
        ({"overlap": "no"}, "overlap is 'no'"),
        ({"others": {"fastckpt": nn.Linear(1, 1)}}, "others has 'fastckpt'"),
    ):
        with pytest.raises(ConfigError, match=says):
            Training(directory, **options)
    assert not directory.exists()


def test_gradients_of_other_ranks_are_dropped_with_a_warning(monkeypatch, said):
    model = nn.Linear(8, 4)
    gradients = Gradients(model, (), None, saved=True)
    empty = gradients.state()
    model(torch.ones(8)).sum().backward()
    saved = gradients.state() | {}
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    gradients.load(empty)
    assert model.weight.grad is None
    assert not said.text
    for state, says in ((saved, "is one of 1 ranks"), (None, "fewer ranks, or without gradients")):
        gradients.load(state)
        assert model.weight.grad is None
        assert says in said.text
    monkeypatch.setenv("WORLD_SIZE", "1")
    gradients.load(saved)
    assert torch.equal(model.weight.grad, torch.ones(4, 8))
    with pytest.raises(ConfigError, match="gradients of other, which the model lacks"):
        gradients.load(saved | {"grads": {"other": torch.ones(2)}})


def test_a_state_of_another_optimizer_is_refused_and_nothing_changed(directory):
    """The state of AdamW loads into SGD without a word: its learning rate and all. Nothing loads unless all fit."""
    first = Training(directory, every=1)
    with first.resumed():
        first.steps(1, 2)
    other = Training(directory / "unused")
    other.checkpointer.close()
    sgd = torch.optim.SGD(other.model.parameters(), 0.5)
    before = [each.clone() for each in other.model.parameters()]
    events: list[str] = []
    metrics.listen(listener := lambda event: events.append(event["event"]))
    mine = {"model": other.model, "optimizer": sgd, "scheduler": other.scheduler}
    refused = pytest.raises(ConfigError, match="optimizer was saved as AdamW, and is SGD now")
    with Checkpointer(directory, **mine) as checkpointer, refused:
        checkpointer.resume()
    assert "worker_joined" in events and "resumed" not in events, "the launcher reports no resume that failed"
    metrics.unlisten(listener)
    assert same(before, other.model.parameters()) and sgd.param_groups[0]["lr"] == 0.5
    other = Training(directory, scheduler=[other.scheduler])
    with other.checkpointer as checkpointer, pytest.raises(ConfigError, match="scheduler was saved as one"):
        checkpointer.resume()
    assert same(before, other.model.parameters())
    again = Training(directory)
    with again.resumed(2):
        assert first.weights()[0].equal(again.weights()[0])


def test_a_way_past_a_spike_takes_effect_and_again_after_a_restart(directory, said):
    """The learning rate and the seed of the script, and batches that are skipped: within an epoch."""

    def resumed(after: int, lr: float = 0.1, seed: int = 0, **options: Any) -> tuple[float, list[list[int]]]:
        data = ResumableDataLoader(range(60), 4, True, seed=seed)
        training = Training(directory, data=data, every=1, deletion_strategy=KeepLatestStepStrategy(9, str(directory)))
        training.optimizer.param_groups[0] |= {"lr": lr, "initial_lr": lr}
        training.scheduler.base_lrs = [lr]
        with training.resumed(after, **options):
            rate, found = training.optimizer.param_groups[0]["lr"], []
            for batch in itertools.islice(data, 3):
                found.append(batch.tolist())
                training.steps(after + len(found), after + len(found))
        return rate, found

    def order(seed: int) -> list[list[int]]:
        return [batch.tolist() for batch in ResumableDataLoader(range(60), 4, True, seed=seed)]

    assert resumed(0) == (0.1, order(0)[:3])
    assert resumed(3, 0.4, 7) == (pytest.approx(0.01), order(0)[3:6]), "what was saved wins"
    assert "of the checkpoint: lr 0.1 (script: 0.4), seed 0 (script: 7); resume(from_script=" in said.text
    back: Any = {"step": 3, "from_script": ["lr", "seed"], "skip": 2}
    assert resumed(3, 0.4, 7, **back) == (pytest.approx(0.04), order(7)[5:8])
    again = resumed(6, 0.4, 7, from_script=["lr", "seed"])
    assert again == (pytest.approx(0.004), order(7)[8:11]), "neither scaled nor skipped twice"


class SecondRank(SingleRank):
    """An agreement with a first rank, whose agent has made other restarts."""

    life = ("launch", 3, [100.0, 2, "launch", 1])

    def gather(self, value: Any) -> list[Any]:
        given, _, *more = value if len(value) == 4 else (None, None)
        return [[given, self.life, *more], value] if more else [value, value]


def test_all_ranks_go_by_the_failures_that_the_first_one_knows_of(directory, monkeypatch):
    """Agents count their own restarts: ranks that went by these decided unlike, and waited for each other for ever."""
    monkeypatch.setattr(save_frequency, "agreement", lambda world, name: SecondRank())
    with Training(directory).resumed() as checkpointer:
        assert checkpointer._frequency._life.failures == 4
        assert checkpointer._frequency._life.mean_time_between_failures == mean_time_between(4, 100.0)
