"""dcp.async_save with our stager in a job of one rank: the state is copied once and never torn."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import AsyncStager

from fastckpt.dcp import SharedMemoryReader, SharedMemoryStager, SharedMemoryWriter
from fastckpt.errors import ConfigError
from tests.e2e.dcp.states import same, zeros

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
DEADLINE = 60.0


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[SharedMemoryWriter]:
    with SharedMemoryWriter(tmp_path / "run") as made:
        yield made


@pytest.fixture
def stager(writer: SharedMemoryWriter) -> Iterator[SharedMemoryStager]:
    made = SharedMemoryStager(writer)
    yield made
    made.close()


def state(value: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((1000, 100), value)}, "losses": [value], "text": str(value)}


def spoil(values: dict[str, Any]) -> None:
    values["model"]["weight"].fill_(-1)
    values["losses"].append(-1)
    del values["text"]


def load(writer: SharedMemoryWriter) -> dict[str, Any]:
    loaded = zeros(state(0))
    dcp.load(loaded, storage_reader=SharedMemoryReader(writer))
    return loaded


class Late(DefaultSavePlanner):
    """Plans, and hands out each item, once it is let, and sees from where they are copied."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self._seconds = seconds
        self.go = threading.Event()
        self.places: list[int] = []

    def create_local_plan(self) -> SavePlan:
        self.go.wait(self._seconds)
        return super().create_local_plan()

    def resolve_data(self, write_item: Any) -> Any:
        self.go.wait(self._seconds)
        data = super().resolve_data(write_item)
        self.places += [data.data_ptr()] if isinstance(data, torch.Tensor) else []
        return data


def test_a_state_may_change_as_soon_as_the_save_returns(writer: SharedMemoryWriter, stager: SharedMemoryStager):
    assert isinstance(stager, AsyncStager)
    for step in (1, 2):
        values, planner = state(step), Late(0.05)
        future = dcp.async_save(
            values, storage_writer=writer, checkpoint_id=str(step), planner=planner, async_stager=stager
        )
        place = values["model"]["weight"].data_ptr()
        spoil(values)
        future.result(DEADLINE)
        assert planner.places == [place], "it is copied from where it is, and nowhere else"
        assert writer.result and same(load(writer), state(step))


def test_an_async_save_does_not_wait_for_the_commit_and_later_saves_do(
    writer: SharedMemoryWriter, stager: SharedMemoryStager, monkeypatch: pytest.MonkeyPatch
):
    finish, go = writer.finish, threading.Event()
    monkeypatch.setattr(writer, "finish", lambda **given: (go.wait(DEADLINE), finish(**given)))
    options = {"storage_writer": writer, "async_stager": stager}
    first = dcp.async_save(state(1), checkpoint_id="1", **options)
    assert not first.done()
    threading.Timer(0.1, go.set).start()
    second = dcp.async_save(state(2), checkpoint_id="2", **options)
    assert first.done(), "a second one comes after it"
    second.result(DEADLINE)
    go.clear()
    third = dcp.async_save(state(3), checkpoint_id="3", **options)
    assert not third.done()
    threading.Timer(0.1, go.set).start()
    dcp.save(state(4), storage_writer=writer, checkpoint_id="4")
    assert third.done() and third.exception() is None, "so does one of this thread"
    assert same(load(writer), state(4))


def test_an_async_save_that_fails_or_is_refused_does_not_end_training(
    tmp_path: Path, writer: SharedMemoryWriter, stager: SharedMemoryStager
):
    class Failing(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            raise RuntimeError("no plan")

    ours, other = {"storage_writer": writer}, tmp_path / "other"
    for step, (checkpoint_id, options, why) in enumerate(
        [
            ("1", ours | {"planner": Failing()}, "no plan"),
            ("elsewhere", ours, "or the step alone"),
            (None, ours, "with a checkpoint_id"),
            (other, {}, "the same SharedMemoryWriter"),
        ]
    ):
        with pytest.raises((CheckpointException, ConfigError), match=why):
            dcp.async_save(state(1), checkpoint_id=checkpoint_id, async_stager=stager, **options).result(DEADLINE)
        dcp.save(state(2), storage_writer=writer, checkpoint_id=f"{2 * step + 2}")
        newest = f"{2 * step + 3}"
        dcp.async_save(state(3), storage_writer=writer, checkpoint_id=newest, async_stager=stager).result(DEADLINE)
        assert same(load(writer), state(3))
    assert not (other / ".metadata").exists()


def test_an_async_save_overtaken_by_another_fails(writer: SharedMemoryWriter):
    """Else its state would pass for the other's. DCP's own stager waits for nothing."""
    late = Late(DEADLINE)
    first = dcp.async_save(state(1), storage_writer=writer, checkpoint_id="1", planner=late)
    until_begun(writer, 1)
    second = dcp.async_save(state(2), storage_writer=writer, checkpoint_id="2", planner=Late(0.2))
    until_begun(writer, 2)
    late.go.set()
    with pytest.raises(CheckpointException, match="wait for the future"):
        first.result(DEADLINE)
    second.result(DEADLINE)
    assert writer.result and same(load(writer), state(2))


def until_begun(writer: SharedMemoryWriter, step: int) -> None:
    while writer._step != step:
        time.sleep(0.001)


def test_close_waits_for_a_copy_in_progress(tmp_path: Path):
    """What it is copied to is unmapped then."""
    writer, late = SharedMemoryWriter(tmp_path / "run"), Late(0.1)
    future = dcp.async_save(state(1), storage_writer=writer, checkpoint_id="1", planner=late)
    while not writer._turn.locked():
        time.sleep(0.001)
    writer.close()
    assert len(late.places) == 1 and writer.last is not None
    if (error := future.exception(DEADLINE)) is not None:
        assert "the checkpointer is closed" in str(error)


@pytest.mark.gpu
def test_staging_waits_for_the_stream_of_training(writer: SharedMemoryWriter, stager: SharedMemoryStager):
    found = torch.accelerator.current_accelerator()
    assert found is not None and torch.accelerator.is_available(), "pytest -m gpu needs an accelerator"
    values, loaded = (torch.zeros(1 << 24, device=found) for _ in range(2))
    matrix = torch.ones(4096, 4096, device=found)
    for step in (1, 2, 3):
        with torch.Stream(found):
            for _ in range(200):
                matrix = matrix @ matrix / 4096
            values.fill_(step)
            saving = {"storage_writer": writer, "async_stager": stager, "checkpoint_id": str(step)}
            future = dcp.async_save({"values": values}, **saving)
            values.fill_(-1)
        future.result(DEADLINE)
        torch.accelerator.synchronize()
        dcp.load({"values": loaded}, storage_reader=SharedMemoryReader(writer))
        assert torch.equal(loaded, torch.full_like(loaded, step))


def test_staging_waits_for_pending_writes_of_a_device(
    writer: SharedMemoryWriter, stager: SharedMemoryStager, monkeypatch: pytest.MonkeyPatch
):
    """It was launched in a stream of the training thread; DCP's thread has another."""
    values = state(1)

    class Written:
        def synchronize(self) -> None:
            values["model"]["weight"].fill_(2)

    monkeypatch.setattr("fastckpt.dcp.stager._all_launched", Written)
    future = dcp.async_save(values, storage_writer=writer, checkpoint_id="1", async_stager=stager)
    spoil(values)
    future.result(DEADLINE)
    assert torch.equal(load(writer)["model"]["weight"], state(2)["model"]["weight"])
