"""Shards copied in the background, by their place in their storages, in a job of one rank."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastckpt._core.format.distcp import ShardPlanner
from fastckpt._core.snapshot.mutation_check import MutationCheck
from fastckpt.fsdp import FsdpShardCheckpointer, StorageType
from tests.e2e.dcp.states import same, zeros
from tests.e2e.ddp.overlapping import Held, newest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
SIZE = 5000


@pytest.fixture
def held() -> Iterator[Held]:
    with Held() as held:
        yield held


class Training:
    """One whose parameters are parts of larger storages, as FSDP2 pads them, or several of one."""

    def __init__(self, folder: Path, *starts: int, check: bool = False) -> None:
        self.memory = torch.randn(3 * SIZE)
        self.parameters = [torch.nn.Parameter(self.memory.narrow(0, start, SIZE)) for start in starts]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        self.saves = FsdpShardCheckpointer(folder, overlap=self.optimizer)
        self.number = 0
        self.step()
        assert self.save().pending == check, "the first is copied at once"
        self.step()

    @property
    def state(self) -> dict[str, Any]:
        return {f"parameter {i}": each.detach() for i, each in enumerate(self.parameters)}

    def step(self) -> None:
        for each in self.parameters:
            each.grad = torch.ones_like(each)
        self.optimizer.step()

    def save(self, **more: Any) -> Any:
        self.number += 1
        return self.saves.save_checkpoint(self.number, self.state | more, storage_type=StorageType.MEMORY)

    def has_saved(self, number: int, wanted: dict[str, Any]) -> bool:
        """Whether that is the newest checkpoint in memory, as torch itself reads it."""
        found = newest(self.saves)  # type: ignore[arg-type]
        assert found is not None
        dcp.load(state := zeros(wanted), checkpoint_id=found[1])
        return found[0] == number and same(state, wanted)


@pytest.mark.parametrize(("starts", "checked"), [((100,), True), ((0, SIZE), False)])
def test_a_shard_that_is_part_of_a_storage_is_copied_in_the_background(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch, starts: tuple[int, ...], checked: bool
):
    monkeypatch.setenv("FASTCKPT_CHECK_OVERLAP", "yes" if checked else "no")
    training = Training(tmp_path, *starts, check=checked)
    with training.saves:
        for number in (2, 3, 4):
            wanted = copy.deepcopy(training.state)
            assert training.save().pending
            training.memory.data[-100:] = number  # what is beside them
            training.step()
            assert training.has_saved(number, wanted)
    assert ("overlap.commit", 4) in held.said


def test_tensors_outside_the_optimizer_in_a_shared_storage_are_copied_at_once(tmp_path: Path, held: Held):
    """A tensor of the state that belongs to no optimizer, beside a parameter in its storage, or in the parameter."""
    training = Training(tmp_path, 0)
    with training.saves:
        for other in (training.memory[SIZE:], training.memory[SIZE : SIZE + 1], training.memory[10:12]):
            wanted = copy.deepcopy(training.state | {"other": other})
            result = training.save(other=other)
            if "structure" in result.reason:
                result = training.save(other=other)
            assert result.saved and not result.pending
            other.add_(1)
            assert training.has_saved(training.number, wanted)
            training.step()


def test_padded_shards_of_fsdp2_are_copied_in_the_background(request: pytest.FixtureRequest):
    """Of the second of two ranks, in a process group in which nobody answers."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    request.addfinalizer(dist.destroy_process_group)
    model = torch.nn.Linear(400, 41)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    leaves = {"weight": model_state["weight"]} | optimizer_state["state"]["weight"]
    leaves.pop("step")
    shards = [each.to_local() for each in leaves.values()]
    assert [shard.untyped_storage().nbytes() - shard.nbytes for shard in shards] == [1600, 0, 0]
    plan = ShardPlanner().plan(shards, list(leaves)).plan
    assert [MutationCheck([plan], [optimizer]).holds(storage) for storage in plan.storages] == [True, True, True]
    assert [MutationCheck([plan], []).holds(storage) for storage in plan.storages] == [False, False, False]
