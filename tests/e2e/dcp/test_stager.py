"""dcp.async_save with our stager in a job of one rank: the state is copied once and never torn."""

import threading
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
from tests.support.waits import until

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
DEADLINE = 60.0


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


def start(writer: SharedMemoryWriter, step: int, values: Any = None, **options: Any) -> Any:
    return dcp.async_save(values or state(step), storage_writer=writer, checkpoint_id=str(step), **options)


def has(reader: SharedMemoryReader, wanted: dict[str, Any]) -> bool:
    dcp.load(loaded := zeros(state(0)), storage_reader=reader)
    return same(loaded, wanted)


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


def test_a_state_may_change_as_soon_as_the_save_returns(
    writer: SharedMemoryWriter, reader: SharedMemoryReader, stager: SharedMemoryStager
):
    assert isinstance(stager, AsyncStager)
    for step in (1, 2):
        values, planner = state(step), Late(0.05)
        future = start(writer, step, values, planner=planner, async_stager=stager)
        place = values["model"]["weight"].data_ptr()
        spoil(values)
        future.result(DEADLINE)
        assert planner.places == [place], "it is copied from where it is, and nowhere else"
        assert writer.result and has(reader, state(step))


def test_an_async_save_does_not_wait_for_the_commit_and_later_saves_do(
    writer: SharedMemoryWriter,
    reader: SharedMemoryReader,
    stager: SharedMemoryStager,
    monkeypatch: pytest.MonkeyPatch,
):
    finish, go = writer.finish, threading.Event()
    monkeypatch.setattr(writer, "finish", lambda **given: (go.wait(DEADLINE), finish(**given)))
    first = start(writer, 1, async_stager=stager)
    assert not first.done()
    threading.Timer(0.1, go.set).start()
    second = start(writer, 2, async_stager=stager)
    assert first.done(), "a second one comes after it"
    second.result(DEADLINE)
    go.clear()
    third = start(writer, 3, async_stager=stager)
    assert not third.done()
    threading.Timer(0.1, go.set).start()
    dcp.save(state(4), storage_writer=writer, checkpoint_id="4")
    assert third.done() and third.exception() is None, "so does one of this thread"
    assert has(reader, state(4))


def test_an_async_save_that_fails_or_is_refused_does_not_end_training(
    tmp_path: Path, writer: SharedMemoryWriter, reader: SharedMemoryReader, stager: SharedMemoryStager
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
        start(writer, 2 * step + 3, state(3), async_stager=stager).result(DEADLINE)
        assert has(reader, state(3))
    assert not (other / ".metadata").exists()


def test_an_async_save_overtaken_by_another_fails(writer: SharedMemoryWriter, reader: SharedMemoryReader):
    """Else its state would pass for the other's. DCP's own stager waits for nothing."""
    late = Late(DEADLINE)
    first = start(writer, 1, planner=late)
    until(lambda: writer._step == 1, "the first save")
    second = start(writer, 2, planner=Late(0.2))
    until(lambda: writer._step == 2, "the second save")
    late.go.set()
    with pytest.raises(CheckpointException, match="wait for the future"):
        first.result(DEADLINE)
    second.result(DEADLINE)
    assert writer.result and has(reader, state(2))


def test_close_waits_for_a_copy_in_progress(writer: SharedMemoryWriter):
    """What it is copied to is unmapped then."""
    future = start(writer, 1, planner=(late := Late(0.1)))
    until(writer._turn.locked, "the copy")
    writer.close()
    assert len(late.places) == 1 and writer.last is not None
    if (error := future.exception(DEADLINE)) is not None:
        assert "the checkpointer is closed" in str(error)


@pytest.mark.gpu
def test_staging_waits_for_the_stream_of_training(
    writer: SharedMemoryWriter, reader: SharedMemoryReader, stager: SharedMemoryStager
):
    found = torch.accelerator.current_accelerator()
    assert found is not None and torch.accelerator.is_available(), "pytest -m gpu needs an accelerator"
    values, loaded = (torch.zeros(1 << 24, device=found) for _ in range(2))
    matrix = torch.ones(4096, 4096, device=found)
    for step in (1, 2, 3):
        with torch.Stream(found):
            for _ in range(200):
                matrix = matrix @ matrix / 4096
            values.fill_(step)
            future = start(writer, step, {"values": values}, async_stager=stager)
            values.fill_(-1)
        future.result(DEADLINE)
        torch.accelerator.synchronize()
        dcp.load({"values": loaded}, storage_reader=reader)
        assert torch.equal(loaded, torch.full_like(loaded, step))


def test_staging_waits_for_pending_writes_of_a_device(
    writer: SharedMemoryWriter,
    reader: SharedMemoryReader,
    stager: SharedMemoryStager,
    monkeypatch: pytest.MonkeyPatch,
):
    """It was launched in a stream of the training thread; DCP's thread has another."""
    values = state(1)

    class Written:
        def synchronize(self) -> None:
            values["model"]["weight"].fill_(2)

    monkeypatch.setattr("fastckpt.dcp.stager._all_launched", Written)
    future = start(writer, 1, values, async_stager=stager)
    spoil(values)
    future.result(DEADLINE)
    assert has(reader, state(1) | {"model": state(2)["model"]})
