"""Waits for a background copy, calls that do not wait, and copies that fail."""

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fastckpt._core.memory import slots
from fastckpt._core.saver import server
from fastckpt._core.snapshot import overlap
from fastckpt.ddp import StorageType
from tests.e2e.ddp import overlapping
from tests.e2e.ddp.conftest import Ranks, run_script
from tests.e2e.ddp.overlapping import DEADLINE, in_memory, newest, proven
from tests.e2e.ddp.overlapping import held as held
from tests.support.live_folders import remove_live
from tests.unit._core.format.baking import assert_same, reference

DISK, MEMORY = StorageType.DISK, StorageType.MEMORY
pytestmark = pytest.mark.usefixtures("held")


class Training(overlapping.Training):
    """A checkpointer whose save of step 1 is pending; if training ``leaves_none`` of the cores, its copy waits."""

    def __init__(self, ranks: Ranks, world: int = 1, *, leaves_none: bool = False) -> None:
        super().__init__(ranks, partial(torch.optim.SGD, lr=0.1, momentum=0.9), world=world)
        for other in ranks.members[1:]:
            other.save_checkpoint(0, {}, storage_type=MEMORY)
        proven(self.one, self.optimizer, self.state)
        self.one._writer.overlap._cores.none = leaves_none
        self.wanted = reference(self.state())
        assert self.save(1, storage_type=DISK).pending

    def has_saved_step_1(self) -> None:
        assert_same(in_memory(self.one), (1, self.wanted))

    def replace_images(self) -> None:
        """As if somebody had cleaned up, and the saver had created them again."""
        for image in self.one._writer.link.arena.glob("slot-*/model.pt"):
            image.rename(f"{image}.old")
            shutil.copy(f"{image}.old", image)

    def replace_images_and_prefault(self) -> None:
        self.replace_images()
        self.one._writer._snapshots._prefault(("model.pt",))

    def remove_arena(self) -> None:
        remove_live(self.one._writer.link.arena)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "PATIENCE", DEADLINE)


@pytest.fixture
def training(ranks: Ranks, patient: None) -> Training:
    return Training(ranks)


ACTS: dict[str, Callable[[Training], object]] = {
    "a save": lambda training: training.save(2),
    "the same step to disk": lambda training: training.save(1, "mine.pt", storage_type=DISK),
    "metrics": lambda training: training.save(1, metrics={"loss": 2.5}),
    "a wait for storage": lambda training: training.one.wait_latest_checkpoint(60),
    "a load": lambda training: training.one.load_checkpoint(),
    "prepare": lambda training: training.one.prepare(training.state()),
}


@pytest.mark.parametrize(("act", "leaves_none"), [*((act, False) for act in ACTS), ("a save", True)])
def test_each_call_that_needs_the_save_waits_for_the_background_copy(
    ranks, patient, tmp_path, monkeypatch, act, leaves_none
):
    monkeypatch.chdir(tmp_path)
    training = Training(ranks, leaves_none=leaves_none)
    assert newest(training.one)[0] == 0
    ACTS[act](training)
    training.has_saved_step_1()
    if act == "metrics":
        assert slots.read(newest(training.one)[1]).details["metrics"] == {"loss": 2.5}
    with torch.no_grad():
        training.model[0].weight.zero_()
    training.optimizer.step()
    assert training.one.wait_latest_checkpoint(60) == 1
    assert_same(torch.load(training.one._writer.directory + "/checkpoint-1/model.pt"), training.wanted)


def test_a_copy_that_leaves_all_cores_to_training_begins_by_itself_in_the_end(ranks, held, monkeypatch):
    held.holds = False
    monkeypatch.setattr(overlap, "PATIENCE", 0.01)
    training = Training(ranks, leaves_none=True)
    end = time.monotonic() + DEADLINE
    while training.one._writer.overlap.pending and time.monotonic() < end:
        time.sleep(0.01)
        time.sleep(0.01)  # another place in the program: the copy counts once training has moved on
    training.has_saved_step_1()
    assert ("overlap.wait", 1) not in held.said


def test_close_waits_for_the_background_copy(training):
    slot = newest(training.one)[1].parent
    training.one.close()
    assert 1 in [found.step for each in slot.glob("slot-*") if (found := slots.read(each).committed)]


def test_a_save_in_a_signal_handler_while_a_step_waits_succeeds(training, held):
    """It runs in the thread that waits, in the middle of the wait."""
    saved: list[Any] = []
    held.on["overlap.wait"] = lambda: saved or saved.append(None) or saved.append(training.one.prepare({}))
    training.optimizer.step()
    assert saved == [None, None]
    training.has_saved_step_1()
    assert training.save(2).trouble == ""


def test_a_forked_child_does_not_wait_for_the_background_copy(training):
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
    training.has_saved_step_1()


def test_an_overlapped_save_counts_once_each_rank_has_its_part(ranks, patient):
    training = Training(ranks, 2)
    assert not ranks.members[1].save_checkpoint(1, {}, storage_type=DISK).pending
    assert newest(training.one)[0] == 0
    training.optimizer.step()
    assert newest(training.one)[0] == 1


# --- trouble: none of it raises in training; the next save tells of it, and works


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (Training.remove_arena, "step 1 of history 1 was not saved"),
        (Training.replace_images_and_prefault, "was removed"),  # which unmaps no image that is being copied to
    ],
)
def test_memory_removed_during_the_background_copy_loses_only_the_save(training, held, said, harm, says):
    held.on["overlap.copy"] = lambda: harm(training)
    training.optimizer.step()
    assert "step 1 was not saved" in said.text
    del held.on["overlap.copy"]
    result = training.save(2)
    assert result.saved and result.skipped == 1 and says in result.trouble
    training.optimizer.step()
    assert newest(training.one)[0] == 2
    assert training.save(3).trouble == ""


def test_a_launcher_lost_during_the_background_copy_does_not_end_training(ranks, training, held, monkeypatch):
    monkeypatch.setattr(server, "WRITERS_TIMEOUT", 0.1)
    held.on["overlap.copy"] = ranks.saver.close
    training.optimizer.step()
    result = training.save(2)
    assert not result.saved and "gone" in result.reason
    training.optimizer.step()


def test_a_disk_save_of_a_step_whose_copy_was_lost_saves_it_again(training, held):
    held.on["overlap.copy"] = training.replace_images
    training.optimizer.step()
    del held.on["overlap.copy"]
    assert training.save(1, storage_type=DISK).reason == ""
    assert training.one.wait_latest_checkpoint(60) == 1


AT_EXIT = """
import atexit, sys, threading, torch
from fastckpt import DdpCheckpointer, metrics
from fastckpt._core.snapshot import mutation_check
mutation_check.WORTH = 1
waits = threading.Event()

def see(phase, fields):
    waits.set() if phase == "overlap.wait" else phase == "overlap.copy" and waits.wait(60)

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

metrics.observe(see)
atexit.register(last)
save(1)
save(2)
"""


def test_the_end_of_the_interpreter_waits_for_the_background_copy(tmp_path, ranks, forked_launchers):
    """A save that is made then is copied at once: threads that copy take no more work."""
    ranks.start(0)
    said = run_script(AT_EXIT, tmp_path, str(ranks.directory), FASTCKPT_FILL_THREADS="2")
    ranks.end()
    assert said.split() == ["False", "True", "False"]
    assert set(torch.load(ranks.directory / "checkpoint-3" / "model.pt")["w"].tolist()) == {-3.0}
