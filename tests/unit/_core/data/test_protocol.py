"""Data states that a checkpointer saves, for each kind of loader."""

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torchdata.stateful_dataloader import StatefulDataLoader

from fastckpt.checkpointer.gradients import Gradients
from fastckpt.checkpointer.state import TrainingState
from fastckpt.data import ResumableDataLoader, ResumableSampler, data_state, load_data_state
from fastckpt.errors import ConfigError
from tests.unit.data.jobs import Indexed, Remembering, indices
from tests.unit.data.streams import hugging_face


class Foreign:
    """Has a state and no more, as torchdata's StatefulDataLoader."""

    def __init__(self, num_workers: int = 0) -> None:
        self.num_workers = num_workers
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def parts_of(loaders: Any) -> TrainingState:
    """As others={"more": loaders} of a Checkpointer."""
    return TrainingState({"more": loaders}, None, Gradients(torch.nn.Linear(1, 1), [], None, saved=False))


def test_common_and_per_rank_data_states_come_back() -> None:
    for make in (Indexed, Remembering):
        data, again = ResumableDataLoader(make(5), 1), ResumableDataLoader(make(5), 1)
        next(iter(data))
        state = data_state(data)
        load_data_state(again, state.common, state.own or None)
        assert [indices(batch) for batch in again] == [[1], [2], [3], [4]]
    sampler, other = (ResumableSampler(Indexed(5), shuffle=False) for _ in range(2))
    sampler.advance(2)
    load_data_state(other, *data_state(sampler))
    assert list(other) == [2, 3, 4] and isinstance(sampler, Stateful) and isinstance(data, Stateful)


def test_a_foreign_stateful_loader_resumes_its_position(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Foreign(2)
    data.position = 7
    common, own = data_state(data)
    again = Foreign(2)
    load_data_state(again, common, own)
    assert again.position == 7
    with pytest.raises(ConfigError, match="saved with 2 loader workers, now 3"):
        load_data_state(Foreign(3), common, own)
    with pytest.raises(ConfigError, match="rank 0 has no position"):
        load_data_state(again, common, None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"saved with 1 ranks, now 2\. Give .* or use ResumableDataLoader"):
        load_data_state(Foreign(2), common, own)


def test_objects_without_a_data_state_are_refused() -> None:
    common, own = data_state(Foreign())
    with pytest.raises(ConfigError, match="another kind of loader than ResumableDataLoader"):
        load_data_state(ResumableDataLoader(Indexed(3)), common, own)
    with pytest.raises(ConfigError, match="another kind of loader than Foreign"):
        load_data_state(Foreign(), *data_state(ResumableDataLoader(Indexed(3))))
    with pytest.raises(ConfigError, match="list has no state_dict and no load_state_dict"):
        data_state([])


def test_a_loader_state_known_to_lose_samples_is_refused_inside_other_loaders() -> None:
    stream = hugging_face(40)
    data_state(StatefulDataLoader(stream, 4))
    shuffled = stream.shuffle(seed=0, buffer_size=10)
    for data in (shuffled, StatefulDataLoader(shuffled, 4)):
        says = f"the state of {type(data).__name__} leaves out the shuffle buffer .* Give data=ResumableDataLoader"
        with pytest.raises(ConfigError, match=says):
            data_state(data)
    with pytest.raises(ConfigError, match="leaves out the shuffle buffer"):
        parts_of(data)
    data_state(ResumableDataLoader(shuffled, 4))


def test_a_list_of_loaders_that_differ_among_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parts_of([ResumableDataLoader(Indexed(4))] * 2)
    says = "more is a list of loaders, .* such as others={'more_0'"
    with pytest.raises(ConfigError, match=says):
        parts_of([ResumableDataLoader(Remembering(4), sharded=True)] * 2)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says):
        parts_of([StatefulDataLoader(list(range(4)), 2)] * 2)
