"""Reports of a worker about its steps and phases."""

import os

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from fastckpt import phase
from fastckpt._core import metrics
from fastckpt._core.client.heartbeat import Heartbeat
from fastckpt._core.memory.telemetry import TelemetryBlock, telemetry_name, unlink
from fastckpt.errors import ConfigError


@pytest.fixture
def block(tmp_path):
    name = telemetry_name(tmp_path)
    block = TelemetryBlock(name, 1)
    yield block
    block.close()
    unlink(name)


@pytest.fixture
def beats(block):
    beats = Heartbeat(block.line(0), 4, 0)
    yield beats
    beats.close()


def optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1)


def test_the_heartbeat_counts_each_step_of_any_optimizer_from_none(block, beats):
    said = block.read(0)
    assert (said.generation, said.step, said.loaded, said.steps, said.first, said.pid) == (4, -1, -1, 0, 0, os.getpid())
    for which in (optimizer(), optimizer()):
        before = block.read(0)
        which.step()
        after = block.read(0)
        assert after.steps == before.steps + 1
        assert after.beat > before.beat
    assert 0 < block.read(0).first < block.read(0).beat


def test_an_optimizer_step_by_which_torch_creates_states_does_not_count(block, beats):
    """A rank that resumes FSDP would else have trained before it has loaded."""
    model = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    torch.optim.lr_scheduler.StepLR(adam, 1)  # which wraps step()
    get_optimizer_state_dict(model, adam)
    assert adam.state and (block.read(0).steps, block.read(0).first) == (0, 0)
    adam.step()
    assert block.read(0).steps == 1


def test_steps_that_the_script_names_count_and_neither_optimizers_nor_saves_do(block, beats):
    beats.by_script = True
    beats.resume(40)
    for step in (41, 42):
        optimizer().step()
        before = block.read(0)
        optimizer().step()
        assert (block.read(0).steps, block.read(0).beat > before.beat) == (before.steps, True)
        beats.reach(step)
        beats.reach(step)
        with beats.save(step):
            pass
    assert (block.read(0).steps, block.read(0).step, block.read(0).named) == (2, 42, 2)


def test_a_forked_child_sends_no_heartbeat(block, beats):
    before = block.read(0)
    if (pid := os.fork()) == 0:
        with phase("in the child"):
            optimizer().step()
        os._exit(0)
    os.waitpid(pid, 0)
    assert block.read(0) == before


@pytest.mark.parametrize("begin", [0, 40])
def test_without_an_optimizer_saves_count_as_steps_but_for_one_before_the_first_step(block, beats, begin):
    """That has yet to come, which may take long."""
    if begin:
        beats.resume(begin)
    for count, number in enumerate((begin, begin + 1, begin + 4)):
        with beats.save(number):
            assert block.read(0).phase == "save"
        found = block.read(0)
        assert (found.steps, found.step, found.phase, bool(found.first)) == (count, number, "", count > 0)
        assert found.named == count, "the save is the step that it names, not one after it"
    optimizer().step()
    with beats.save(begin + 5):
        pass
    assert (block.read(0).steps, block.read(0).step) == (3, begin + 5)


def test_marked_phases_nest_and_have_their_limits(block, beats):
    def shown() -> tuple[str, int]:
        return block.read(0).phase, block.read(0).allowed // 10**9

    with phase("evaluation", timeout=90):
        assert shown() == ("evaluation", 90)
        with phase("download"):
            assert shown() == ("download", 90), "that of the whole"
        with phase("generation", timeout=30), phase("download"):
            assert shown() == ("download", 30)
        with beats.save(1), metrics.phase("snapshot.fill"):
            assert shown() == ("snapshot.fill", 0)
        with metrics.phase("snapshot.notify"):  # outside of a save: nothing would say that it is over
            assert shown() == ("evaluation", 90)
    assert (block.read(0).phase, block.read(0).allowed) == ("", 0)
    with phase("service", timeout=float("inf")):
        assert shown()[1] > 30 * 365 * 86400
    with phase("x" * 100):
        assert block.read(0).phase == "x" * len(block.read(0).phase)
    with beats.stall("wait", 1800.0):
        assert shown()[0] == "wait" and 1800 < block.read(0).allowed / 1e9 < 3600


def test_a_phase_that_would_count_as_hung_or_as_none_is_refused(block, beats):
    for name, timeout in (("x", -1.0), ("x", float("nan")), ("", 9.0), (" ", 9.0), ("\0", 9.0)):
        with pytest.raises(ConfigError, match="phase"), phase(name, timeout=timeout):
            pass
    assert block.read(0).phase == ""
