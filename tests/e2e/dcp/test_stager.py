"""dcp.async_save with our stager in a job of one rank: the state is copied once and never torn."""

import pickle
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


def test_the_stager_fulfils_the_protocol_of_dcp(stager: SharedMemoryStager):
    assert isinstance(stager, AsyncStager)


def test_a_state_may_change_as_soon_as_the_save_returns(writer: SharedMemoryWriter, stager: SharedMemoryStager):
    for step in (1, 2, 3):
        values, planner = state(step), Late(0.05)
        future = dcp.async_save(
            values, storage_writer=writer, checkpoint_id=str(step), planner=planner, async_stager=stager
        )
        place = values["model"]["weight"].data_ptr()
        spoil(values)
        future.result(DEADLINE)
        assert planner.places == [place], "it is copied from where it is, and nowhere else"
        assert writer.result and same(load(writer), state(step))


def test_an_async_save_does_not_wait_for_the_commit(
    writer: SharedMemoryWriter, stager: SharedMemoryStager, monkeypatch: pytest.MonkeyPatch
):
    finish, go = writer.finish, threading.Event()
    monkeypatch.setattr(writer, "finish", lambda **given: (go.wait(DEADLINE), finish(**given)))
    first = dcp.async_save(state(1), storage_writer=writer, checkpoint_id="1", async_stager=stager)
    assert not first.done()
    threading.Timer(0.2, go.set).start()
    second = dcp.async_save(state(2), storage_writer=writer, checkpoint_id="2", async_stager=stager)
    assert first.done(), "a second one comes after it"
    second.result(DEADLINE)
    assert same(load(writer), state(2))


def test_an_async_save_that_fails_does_not_end_training(writer: SharedMemoryWriter, stager: SharedMemoryStager):
    class Failing(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            raise RuntimeError("no plan")

    options = {"storage_writer": writer, "async_stager": stager}
    for checkpoint_id, planner, why in (("1", Failing(), "no plan"), ("elsewhere", None, "or the step alone")):
        future = dcp.async_save(state(1), checkpoint_id=checkpoint_id, planner=planner, **options)
        with pytest.raises((CheckpointException, ConfigError), match=why):
            future.result(DEADLINE)
    dcp.save(state(2), storage_writer=writer, checkpoint_id="2")
    dcp.async_save(state(3), checkpoint_id="3", **options).result(DEADLINE)
    assert same(load(writer), state(3))


def test_a_stager_with_a_writer_of_another_kind_is_refused(tmp_path: Path, stager: SharedMemoryStager):
    future = dcp.async_save(state(1), checkpoint_id=tmp_path / "other", async_stager=stager)
    with pytest.raises(ConfigError, match="the same SharedMemoryWriter"):
        future.result(DEADLINE)
    assert not (tmp_path / "other" / ".metadata").exists()


@pytest.mark.parametrize("checkpoint_id", [None, "elsewhere"])
def test_a_save_after_a_refused_one_succeeds(
    writer: SharedMemoryWriter, stager: SharedMemoryStager, checkpoint_id: str | None
):
    with pytest.raises(ConfigError):
        options = {"storage_writer": writer, "async_stager": stager}
        dcp.async_save(state(1), checkpoint_id=checkpoint_id, **options).result(DEADLINE)
    dcp.save(state(2), storage_writer=writer, checkpoint_id="2")
    dcp.async_save(state(3), checkpoint_id="3", **options).result(DEADLINE)
    assert same(load(writer), state(3))


def test_a_save_of_another_thread_waits_for_a_staged_one(
    writer: SharedMemoryWriter, stager: SharedMemoryStager, monkeypatch: pytest.MonkeyPatch
):
    finish = writer.finish
    monkeypatch.setattr(writer, "finish", lambda **given: (time.sleep(0.2), finish(**given)))
    first = dcp.async_save(state(1), storage_writer=writer, checkpoint_id="1", async_stager=stager)
    assert not first.done()
    dcp.save(state(2), storage_writer=writer, checkpoint_id="2")
    assert first.done() and first.exception() is None
    assert same(load(writer), state(2))


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


def test_staging_in_another_process_is_refused(writer: SharedMemoryWriter, stager: SharedMemoryStager):
    stager.stage(state(1))
    with pytest.raises(TypeError, match="THREAD"):
        pickle.dumps(writer)
    stager.synchronize_staging()
