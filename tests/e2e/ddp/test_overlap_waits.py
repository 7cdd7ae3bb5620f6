"""Waits for a background copy, calls that do not wait, and copies that fail."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt._core.config import AGENT_VARIABLE, Settings
from fastckpt._core.memory import slots
from fastckpt._core.saver import server
from fastckpt._core.snapshot import mutation_check, overlap
from fastckpt.ddp import DdpCheckpointer, StorageType
from tests.e2e.ddp.conftest import Ranks, state
from tests.e2e.ddp.overlapping import DEADLINE, Held, in_memory, net, newest, proven
from tests.support.live_folders import remove_live
from tests.unit._core.format.baking import assert_same, reference

DISK, MEMORY = StorageType.DISK, StorageType.MEMORY


class Training:
    """A checkpointer whose save of step 1 is pending; if training ``leaves_none`` of the cores, its copy waits."""

    def __init__(self, ranks: Ranks, world: int = 1, *, leaves_none: bool = False) -> None:
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.one = ranks.start(world, overlap=self.optimizer)[0]
        for other in ranks.members[1:]:
            other.save_checkpoint(0, {}, storage_type=MEMORY)
        proven(self.one, self.optimizer, self.state)
        self.one._writer.overlap._cores.none = leaves_none
        self.wanted = reference(self.state())
        assert self.one.save_checkpoint(1, self.state(), storage_type=DISK).pending

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def replace_images(self) -> None:
        """As if somebody had cleaned up, and the saver had created them again."""
        for image in self.one._writer.link.arena.glob("slot-*/model.pt"):
            image.rename(f"{image}.old")
            shutil.copy(f"{image}.old", image)

    def remove_arena(self) -> None:
        remove_live(self.one._writer.link.arena)


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    monkeypatch.setattr(mutation_check, "WORTH", 1)
    with Held() as held:
        yield held


@pytest.fixture(params=[False, True], ids=["a core to spare", "all cores busy"])
def training(ranks: Ranks, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Training:
    monkeypatch.setattr(overlap, "PATIENCE", DEADLINE)
    return Training(ranks, leaves_none=request.param)


ACTS: dict[str, Callable[[DdpCheckpointer, dict[str, Any]], object]] = {
    "a save": lambda one, state: one.save_checkpoint(2, state, storage_type=MEMORY),
    "the same step": lambda one, state: one.save_checkpoint(1, state, storage_type=MEMORY),
    "the same step to disk": lambda one, state: one.save_checkpoint(1, state, "mine.pt", DISK),
    "metrics": lambda one, state: one.save_checkpoint(1, state, metrics={"loss": 1.0}, storage_type=MEMORY),
    "a wait for storage": lambda one, _: one.wait_latest_checkpoint(60),
    "a load": lambda one, _: one.load_checkpoint(),
    "prepare": lambda one, state: one.prepare(state),
}


class TestWaits:
    @pytest.mark.parametrize("act", ACTS)
    def test_each_call_that_needs_the_save_waits_for_the_background_copy(
        self, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
    ):
        monkeypatch.chdir(tmp_path)
        assert newest(training.one)[0] == 0
        ACTS[act](training.one, training.state())
        assert_same(in_memory(training.one), (1, training.wanted))
        with torch.no_grad():
            training.model[0].weight.zero_()
        training.optimizer.step()
        assert training.one.wait_latest_checkpoint(60) == 1
        assert_same(torch.load(training.one._writer.directory + "/checkpoint-1/model.pt"), training.wanted)

    def test_a_copy_that_leaves_all_cores_to_training_begins_by_itself_in_the_end(
        self, ranks: Ranks, held: Held, monkeypatch: pytest.MonkeyPatch
    ):
        held.holds = False
        monkeypatch.setattr(overlap, "PATIENCE", 0.01)
        training = Training(ranks, leaves_none=True)
        end = time.monotonic() + DEADLINE
        while training.one._writer.overlap.pending and time.monotonic() < end:
            time.sleep(0.01)
            time.sleep(0.01)  # another place in the program: the copy counts once training has moved on
        assert_same(in_memory(training.one), (1, training.wanted))
        assert ("overlap.wait", 1) not in held.said

    def test_a_copy_that_leaves_all_cores_to_training_has_not_begun_before_training_waits(
        self, ranks: Ranks, held: Held, monkeypatch: pytest.MonkeyPatch
    ):
        held.holds = False
        monkeypatch.setattr(overlap, "PATIENCE", DEADLINE)
        training = Training(ranks, leaves_none=True)
        training.optimizer.step()
        assert [phase for phase, step in held.said if step == 1][:2] == ["overlap.wait", "overlap.copy"]
        assert_same(in_memory(training.one), (1, training.wanted))

    def test_a_write_before_a_copy_that_leaves_all_cores_to_training_costs_that_save_alone(
        self, training: Training, caplog: pytest.LogCaptureFixture
    ):
        with torch.no_grad():
            training.model[0].weight.zero_()
        training.optimizer.step()
        assert newest(training.one)[0] == 0
        assert "was written to between the save of step 1" in caplog.text
        assert not training.one.save_checkpoint(2, training.state(), storage_type=MEMORY).pending

    def test_metrics_given_while_a_save_is_pending_are_kept(self, training: Training):
        assert training.one.save_checkpoint(1, training.state(), metrics={"loss": 2.5}, storage_type=MEMORY)
        assert slots.read(newest(training.one)[1]).details["metrics"] == {"loss": 2.5}

    def test_close_waits_for_the_background_copy(self, training: Training):
        slot = newest(training.one)[1].parent
        training.one.close()
        assert 1 in [found.step for each in slot.glob("slot-*") if (found := slots.read(each).committed)]

    def test_an_optimizer_step_in_another_thread_waits_for_the_background_copy(self, training: Training):
        other = threading.Thread(target=training.optimizer.step)
        other.start()
        other.join()
        assert_same(in_memory(training.one), (1, training.wanted))

    def test_a_save_in_a_signal_handler_while_a_step_waits_succeeds(self, training: Training, held: Held):
        """It runs in the thread that waits, in the middle of the wait."""
        saved: list[Any] = []
        held.on["overlap.wait"] = lambda: saved or saved.append(None) or saved.append(training.one.prepare({}))
        training.optimizer.step()
        assert saved == [None, None]
        assert_same(in_memory(training.one), (1, training.wanted))
        assert training.one.save_checkpoint(2, training.state(), storage_type=MEMORY).trouble == ""

    def test_a_forked_child_does_not_wait_for_the_background_copy(self, training: Training):
        child = os.fork()
        if child == 0:
            overlap = training.one._writer.overlap
            overlap._before_step(training.optimizer, (), {})
            overlap.wait()
            training.one.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert newest(training.one)[0] == 0
        training.optimizer.step()
        assert_same(in_memory(training.one), (1, training.wanted))

    def test_an_optimizer_step_without_a_pending_save_does_not_wait(self, training: Training, held: Held):
        training.optimizer.step()
        before = list(held.said)
        training.optimizer.step()
        assert held.said == before

    def test_an_overlapped_save_counts_once_each_rank_has_its_part(self, ranks: Ranks):
        training = Training(ranks, 2)
        assert not ranks.members[1].save_checkpoint(1, {}, storage_type=DISK).pending
        assert newest(training.one)[0] == 0
        training.optimizer.step()
        assert newest(training.one)[0] == 1

    def test_the_wait_for_a_background_copy_is_reported_as_stall_and_phase(self, ranks: Ranks, held: Held):
        training = Training(ranks)
        (read,) = [lambda: next(iter(ranks.saver.telemetry().values()))[0]]
        seen: list[str] = []
        held.on["overlap.compare"] = lambda: seen.append(read().phase)
        before = read().stalled
        training.optimizer.step()
        assert seen == ["overlap.wait"]
        assert read().stalled > before and read().phase == ""


class TestTrouble:
    """None of it raises in training; the next save tells of it, and works."""

    def test_an_arena_removed_during_the_background_copy_loses_only_the_save(
        self, training: Training, held: Held, said: pytest.LogCaptureFixture
    ):
        held.on["overlap.copy"] = training.remove_arena
        training.optimizer.step()
        assert "step 1 was not saved" in said.text
        del held.on["overlap.copy"]
        result = training.one.save_checkpoint(2, training.state(), storage_type=MEMORY)
        assert result.saved and result.skipped == 1 and "step 1 of history 1 was not saved" in result.trouble
        training.optimizer.step()
        assert newest(training.one)[0] == 2
        assert training.one.save_checkpoint(3, training.state(), storage_type=MEMORY).trouble == ""

    def test_an_image_replaced_during_the_background_copy_loses_only_the_save(self, training: Training, held: Held):
        held.on["overlap.copy"] = training.replace_images
        training.optimizer.step()
        assert newest(training.one)[0] == 0
        del held.on["overlap.copy"]
        assert "was removed" in training.one.save_checkpoint(2, training.state(), storage_type=MEMORY).trouble
        training.optimizer.step()
        assert newest(training.one)[0] == 2

    def test_a_launcher_lost_during_the_background_copy_does_not_end_training(
        self, ranks: Ranks, training: Training, held: Held, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(server, "WRITERS_TIMEOUT", 0.1)
        held.on["overlap.copy"] = ranks.saver.close
        training.optimizer.step()
        result = training.one.save_checkpoint(2, training.state(), storage_type=MEMORY)
        assert not result.saved and "gone" in result.reason
        training.optimizer.step()

    def test_a_disk_save_of_a_step_whose_copy_was_lost_saves_it_again(self, training: Training, held: Held):
        held.on["overlap.copy"] = training.replace_images
        training.optimizer.step()
        del held.on["overlap.copy"]
        assert training.one.save_checkpoint(1, training.state(), storage_type=DISK).reason == ""
        assert training.one.wait_latest_checkpoint(60) == 1

    def test_prefaulting_unmaps_no_image_in_use(self, training: Training, held: Held):
        """The images were removed and created again while one is being copied to and found by the prefault thread."""
        snapshots = training.one._writer._snapshots

        def remap() -> None:
            training.replace_images()
            snapshots._prefault(("model.pt",))

        held.on["overlap.copy"] = remap
        training.optimizer.step()
        assert newest(training.one)[0] == 0

    def test_overlapped_saves_of_a_state_that_shrinks_and_grows_hold_their_steps(self, training: Training):
        for step, size in enumerate([10, 300_000, 10, 400_000], 2):
            more = training.state() | state(step, size)
            wanted = reference(more)
            assert training.one.save_checkpoint(step, more, storage_type=MEMORY).pending
            training.optimizer.step()
            assert_same(in_memory(training.one), (step, wanted))


PROGRAM = """
import sys, threading, torch
from fastckpt import DdpCheckpointer, metrics
from fastckpt._core.snapshot import mutation_check as still
still.WORTH = 1
waits = threading.Event()

def see(phase, fields):
    waits.set() if phase == "overlap.wait" else phase == "overlap.copy" and waits.wait(60)

metrics.observe(see)
weight = torch.nn.Parameter(torch.ones(5))
optimizer = torch.optim.SGD([weight], lr=1.0)
checkpointer = DdpCheckpointer(sys.argv[1], overlap=optimizer)
for step in range(3):
    weight.grad = torch.ones(5)
    optimizer.step()
    result = checkpointer.save_checkpoint(step, {"w": weight})
print(result.pending)
"""


def test_the_end_of_the_interpreter_waits_for_the_background_copy(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "True\n", done.stderr
    assert torch.load(tmp_path / "checkpoint-2" / "model.pt")["w"].tolist() == [-2.0] * 5


AT_EXIT = """
import atexit, sys, torch
from fastckpt import DdpCheckpointer

weight = torch.nn.Parameter(torch.zeros(300_000))
optimizer = torch.optim.SGD([weight], lr=1.0)
checkpointer = DdpCheckpointer(sys.argv[1], overlap=optimizer)

def save(step):
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    print(checkpointer.save_checkpoint(step, {"w": weight}).pending)

def last():
    save(3)
    checkpointer.close()

atexit.register(last)
save(1)
save(2)
"""


def test_a_save_at_the_end_of_the_interpreter_is_copied_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that copy take no more work then."""
    monkeypatch.setenv("FASTCKPT_FILL_THREADS", "2")
    agent = server.Saver(Settings.from_environment())
    agent.start()
    monkeypatch.setenv(AGENT_VARIABLE, agent.address)
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    agent.close()
    assert done.stdout.split() == ["False", "True", "False"], done.stderr
    assert set(torch.load(tmp_path / "checkpoint-3" / "model.pt")["w"].tolist()) == {-3.0}
