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
    for make in (lambda: ResumableDataLoader(Indexed(5), 1), lambda: ResumableDataLoader(Remembering(5), 1)):
        data = make()
        assert isinstance(data, Stateful)
        next(iter(data))
        state, again = data_state(data), make()
        load_data_state(again, state.common, state.own or None)
        assert [indices(batch) for batch in again] == [[1], [2], [3], [4]]
    sampler = ResumableSampler(Indexed(5), shuffle=False)
    assert isinstance(sampler, Stateful)
    sampler.advance(2)
    again_sampler = ResumableSampler(Indexed(5), shuffle=False)
    load_data_state(again_sampler, *data_state(sampler))
    assert list(again_sampler) == [2, 3, 4]


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


@pytest.mark.parametrize(("workers", "generated"), [(0, True), (1, False), (0, False)])
def test_a_loader_of_torchdata_resumes_as_an_uninterrupted_run(
    workers: int, generated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its order in later epochs, and what training draws: an iterator that begins draws a seed for its workers."""

    def loader() -> StatefulDataLoader[Any]:
        generator = torch.Generator().manual_seed(3) if generated else None
        return StatefulDataLoader(list(range(24)), 4, shuffle=True, generator=generator, num_workers=workers)

    def rest(iterator: Any) -> list[Any]:
        return [batch.tolist() for batch in iterator] + [torch.rand(1).item()]

    torch.manual_seed(5)
    whole = loader()
    iterator = iter(whole)
    for _ in range(2):
        next(iterator)
    state, rng = data_state(whole), torch.get_rng_state()
    then = [rest(iterator), rest(whole)]
    again = loader()
    torch.set_rng_state(rng)
    load_data_state(again, *state)
    assert [rest(again), rest(again)] == then
    assert not caplog.messages
    early = loader()
    iter(early)
    load_data_state(early, *state)
    assert "was iterated before resume()" in caplog.text
    state.own.pop("generator", None)
    load_data_state(loader(), *state)  # an earlier version's


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
