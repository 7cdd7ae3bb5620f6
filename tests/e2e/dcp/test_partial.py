"""Loads of checkpoints with more or fewer names than the state: as stock DCP loads them, strict and not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from fastckpt.errors import ConfigError
from fastckpt.fsdp import FsdpShardCheckpointer, StorageType

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def model(layers: int, value: float) -> nn.Sequential:
    made = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)])
    for parameter in made.parameters():
        nn.init.constant_(parameter, value)
    return made


def values(of: nn.Module) -> list[float]:
    """Of each layer's weight, which has one value everywhere."""
    return [float(weight.detach().unique()) for name, weight in of.named_parameters() if name.endswith("weight")]


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[FsdpShardCheckpointer]:
    """Has saved two layers of ones."""
    with FsdpShardCheckpointer(tmp_path / "run") as made:
        made.save_checkpoint(1, {"model": get_model_state_dict(model(2, 1.0))}, storage_type=StorageType.MEMORY)
        yield made


def load(checkpointer: FsdpShardCheckpointer, of: nn.Module, **options: Any) -> None:
    """As a user of DCP does it, by the reader."""
    state = {"model": get_model_state_dict(of)}
    dcp.load(state, storage_reader=checkpointer.get_storage_reader(), **options)
    set_model_state_dict(of, state["model"], options=StateDictOptions(strict=False))


def test_a_checkpoint_with_more_names_gives_those_of_the_model(checkpointer: FsdpShardCheckpointer):
    for strict in (True, False):
        smaller = model(1, 5.0)
        load(checkpointer, smaller, planner=DefaultLoadPlanner(allow_partial_load=not strict))
        assert values(smaller) == [1.0]
    smaller = model(1, 5.0)
    checkpointer.load_checkpoint(smaller)
    assert values(smaller) == [1.0] and checkpointer.loaded_step == 1


def test_a_model_with_more_names_is_refused_or_keeps_its_own_if_not_strict(
    checkpointer: FsdpShardCheckpointer,
):
    larger = model(3, 5.0)
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: model\.2\.weight"):
        load(checkpointer, larger)
    with pytest.raises(ConfigError, match=r"it has no model\.2\.bias, model\.2\.weight\. Give"):
        checkpointer.load_checkpoint(larger)
    assert values(larger) == [5.0, 5.0, 5.0]
    load(checkpointer, larger, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert values(larger) == [1.0, 1.0, 5.0]
    torch.testing.assert_close(larger[2].bias, torch.full((3,), 5.0))
    assert checkpointer.save_checkpoint(2, larger, storage_type=StorageType.MEMORY), "the job goes on"
