"""What a checkpointer saves of data, whatever hands them out."""

from typing import Any

import pytest
from torch.distributed.checkpoint.stateful import Stateful

from fastckpt.data import ResumableDataLoader, ResumableSampler, data_state, load_data_state
from fastckpt.errors import ConfigError
from tests.data.jobs import Indexed, Remembering, indices


class Foreign:
    """Has a state and no more, as torchdata's StatefulDataLoader."""

    def __init__(self, num_workers: int = 0) -> None:
        self.num_workers = num_workers
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_ours_are_stateful() -> None:
    assert isinstance(ResumableDataLoader(Indexed(3)), Stateful)
    assert isinstance(ResumableSampler(Indexed(3)), Stateful)


def test_common_and_own_come_back() -> None:
    for make in (lambda: ResumableDataLoader(Indexed(5), 1), lambda: ResumableDataLoader(Remembering(5), 1)):
        data = make()
        next(iter(data))
        state, again = data_state(data), make()
        load_data_state(again, state.common, state.own or None)
        assert [indices(batch) for batch in again] == [[1], [2], [3], [4]]
    sampler = ResumableSampler(Indexed(5), shuffle=False)
    sampler.advance(2)
    again_sampler = ResumableSampler(Indexed(5), shuffle=False)
    load_data_state(again_sampler, *data_state(sampler))
    assert list(again_sampler) == [2, 3, 4]


def test_a_foreign_object_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_other_kinds_are_refused() -> None:
    common, own = data_state(Foreign())
    with pytest.raises(ConfigError, match="another kind of loader than ResumableDataLoader"):
        load_data_state(ResumableDataLoader(Indexed(3)), common, own)
    with pytest.raises(ConfigError, match="another kind of loader than Foreign"):
        load_data_state(Foreign(), *data_state(ResumableDataLoader(Indexed(3))))
    with pytest.raises(ConfigError, match="list has no state_dict and no load_state_dict"):
        data_state([])
