"""FSDP checkpointers in a job of one rank, where nothing is sharded."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from fastckpt.errors import BadCheckpoint, ConfigError, NoLoadableCheckpoint, NotLoadable, StepError
from fastckpt.fsdp import FsdpFullCheckpointer, FsdpShardCheckpointer, StorageType
from tests.e2e.dcp.states import same
from tests.e2e.ddp.conftest import said as said

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
Made = FsdpShardCheckpointer


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Made]:
    with FsdpShardCheckpointer(tmp_path / "run") as made:
        yield made


class Training:
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> "Training":
        self.model(torch.randn(4, 5)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    @property
    def state(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [each.clone() for each in (*self.model.state_dict().values(), *moments)]


def save(checkpointer: Any, training: Training, step: int, **options: Any) -> Any:
    return checkpointer.save_checkpoint(step, model=training.model, optimizer=training.optimizer, **options)


@pytest.mark.parametrize("kind", [FsdpShardCheckpointer, FsdpFullCheckpointer])
def test_an_fsdp_checkpoint_resumes_with_model_optimizer_and_extra_state(tmp_path: Path, kind: Any):
    extra = {"step": 2, "note": "n", "deep": {"list": [torch.arange(3), {"a": (1, "b")}], "empty": {}, "odd": [{}, 5]}}
    keys = torch.optim.lr_scheduler.MultiStepLR(Training().optimizer, [7, 7, 9]).state_dict()
    extra |= {"scheduler": keys, "nested": [{"a": {5: torch.arange(2)}}]}
    with kind(tmp_path) as checkpointer:
        training = Training().step()
        assert checkpointer.load_checkpoint(training.model, training.optimizer) == {}
        assert checkpointer.loaded_step == -1
        with pytest.raises(BadCheckpoint, match="7"):
            checkpointer.load_checkpoint(training.model, training.optimizer, "7")
        assert save(checkpointer, training, 1)
        training.step()
        for _ in range(2 if kind is FsdpShardCheckpointer else 1):
            assert save(checkpointer, training, 2, extra_sd=extra, storage_type=StorageType.DISK, rank_state={"at": 7})
        before, noise = training.state, torch.rand(3)
    other = Training(5)
    with kind(tmp_path) as checkpointer:
        got = checkpointer.load_checkpoint(other.model, other.optimizer)
        assert (checkpointer.loaded_step, checkpointer.loaded_from) == (2, "storage")
        assert checkpointer.rank_state == {"at": 7}
    assert torch.equal(torch.rand(3), noise) and same(other.state, before)
    assert torch.equal(got["deep"].pop("list")[0], torch.arange(3))
    assert (got["step"], got["note"], got["deep"]["odd"][1]) == (2, "n", 5)
    assert got["scheduler"] == keys and torch.equal(got["nested"][0]["a"][5], torch.arange(2))
    if kind is FsdpShardCheckpointer:
        for step in (1, 2):
            (tmp_path / f"checkpoint-{step}" / "__0_0.distcp").write_bytes(b"bad")
        with kind(tmp_path) as checkpointer, pytest.raises(NoLoadableCheckpoint):
            checkpointer.load_checkpoint(training.model, training.optimizer)


def test_a_state_dict_loads_by_dcp_with_the_storage_reader(checkpointer: Made, tmp_path: Path):
    assert checkpointer.get_storage_reader() is None
    state = {"w": torch.arange(5.0), "deep": {"n": 3}}
    path = tmp_path / "run" / "checkpoint-4"
    assert checkpointer.save_checkpoint(4, state, path, StorageType.DISK)
    with pytest.raises(ConfigError, match=r"step 5 cannot be called 'checkpoint-4'"):
        checkpointer.save_checkpoint(5, state, path, storage_type=StorageType.MEMORY)
    noise = torch.rand(2)
    loaded: dict[str, Any] = {"w": torch.zeros(5), "deep": {"n": 0}}
    dcp.load(loaded, storage_reader=checkpointer.get_storage_reader())
    assert torch.equal(torch.rand(2), noise)
    assert torch.equal(loaded["w"], state["w"]) and loaded["deep"] == {"n": 3}
    assert (checkpointer.loaded_step, checkpointer.loaded_from) == (4, "memory")
    checkpointer.wait_latest_checkpoint()
    loaded = {"w": torch.zeros(5), "deep": {"n": 0}}
    dcp.load(loaded, checkpoint_id=path)
    assert torch.equal(loaded["w"], state["w"]) and loaded["deep"] == {"n": 3}, "by stock DCP"


def test_a_load_of_the_model_alone_succeeds(checkpointer: Made):
    training, other = Training().step(), Training(3)
    save(checkpointer, training, 1, extra_sd={"x": 1})
    assert checkpointer.load_checkpoint(other.model) == {"x": 1}
    assert same(other.state, training.state[: len(other.state)])
    with pytest.raises(ConfigError, match="Size mismatch between saved"):
        checkpointer.load_checkpoint(nn.Sequential(nn.Linear(5, 3), nn.Linear(5, 3)))
    assert all(save(checkpointer, training, step) for step in range(2, 6)), "nothing is kept for a load that failed"


def spoil_archives(file: Path) -> None:
    """Have the archive of each tensor name a method of compression that nobody knows."""
    data = bytearray(file.read_bytes())
    for start in (at for at in range(len(data) - 4) if data[at : at + 4] == b"PK\1\2"):
        data[start + 10 : start + 12] = b"\x63\x00"
    file.write_bytes(data)


def test_a_damaged_shard_that_no_digest_tells_of_is_passed_over_for_the_step_before(tmp_path: Path, said):
    training = Training().step()
    with FsdpShardCheckpointer(tmp_path / "run") as checkpointer:
        save(checkpointer, training, 1, storage_type=StorageType.DISK)
        checkpointer.wait_latest_checkpoint(60)
        before = training.state
        save(checkpointer, training.step(), 2, storage_type=StorageType.DISK)
    spoil_archives(tmp_path / "run" / "checkpoint-2" / "__0_0.distcp")
    with FsdpShardCheckpointer(tmp_path / "run", verify="never") as checkpointer:
        checkpointer.load_checkpoint(training.model, training.optimizer)
        assert (checkpointer.loaded_step, same(training.state, before)) == (1, True)
        assert "not resumed from step 2 of history 1 in storage (rank 0: RuntimeError" in said.text
    assert (tmp_path / "run" / "checkpoint-2").exists(), "nothing shows that its bytes are not those that were saved"


def test_values_that_compare_equal_but_differ_are_saved_as_they_are(checkpointer: Made):
    values: list[Any] = [0.0, -0.0, 0, False, 1, True, 1.0, float("nan")]
    for step, value in enumerate(values):
        assert checkpointer.save_checkpoint(step, {"v": value, "t": (value, [value])}, storage_type=StorageType.MEMORY)
        loaded: dict[str, Any] = {"v": None, "t": None}
        dcp.load(loaded, storage_reader=checkpointer.get_storage_reader())
        assert repr(loaded) == repr({"v": value, "t": (value, [value])})


def test_a_value_that_cannot_be_saved_is_named_in_the_error(checkpointer: Made):
    with pytest.raises(Exception) as error:
        checkpointer.save_checkpoint(1, {"deep": {"f": lambda: 0}}, storage_type=StorageType.MEMORY)
    assert "deep.f cannot be saved" in error.value.__notes__

    with pytest.raises(NotLoadable, match="when"):
        save(checkpointer, Training(), 3, rank_state={"when": Path("x")})
    assert save(checkpointer, Training(), 4)
    with pytest.raises(StepError):
        save(checkpointer, Training(), 3)


def test_calls_in_the_form_of_flash_checkpoint_save_and_load(
    checkpointer: Made, tmp_path: Path, said: pytest.LogCaptureFixture
):
    """By place, by name, and mixed; paths as its scripts give them."""
    training, run = Training(), tmp_path / "run"
    training.step()
    model, optimizer = training.model, training.optimizer
    assert checkpointer.save_checkpoint(1, model, optimizer, {"epoch": 1}, run / "1", StorageType.DISK)
    assert checkpointer.save_checkpoint(2, model, optimizer, extra_sd={"epoch": 2}, path=run / "two")
    assert checkpointer.wait_latest_checkpoint(60) == 2
    assert checkpointer.save_checkpoint(3, model, None, None, "/nowhere/3", StorageType.DISK)
    assert checkpointer.save_checkpoint(4, model, optimizer, {"epoch": 4}, rank_state={"at": 4})
    assert checkpointer.wait_latest_checkpoint(60) == 4
    names = sorted(path.parent.name for path in run.glob("*/manifest.json"))
    assert names == ["1", "checkpoint-3", "checkpoint-4", "two"]
    assert said.text.count("cannot lie at /nowhere/3") == 1 and not Path("/nowhere").exists()
    other = Training(3)
    assert checkpointer.load_checkpoint(other.model, other.optimizer) == {"epoch": 4}
    assert checkpointer.rank_state == {"at": 4}
    assert checkpointer.load_checkpoint(other.model, other.optimizer, run / "1") == {"epoch": 1}
    for wrong, text in (((model, 1, 2, 3, 4, 5), "takes 6 positional"), (({}, "", None, 1), "takes 4 positional")):
        with pytest.raises(TypeError, match=text):
            checkpointer.save_checkpoint(5, *wrong)
    with pytest.raises(TypeError, match="'extra_sd' by its place and by its name"):
        checkpointer.save_checkpoint(5, model, optimizer, {}, extra_sd={})
    checkpointer.save_checkpoint(5, {"n": 1}, f"{checkpointer._writer.directory}/mine", StorageType.MEMORY)
    checkpointer.close()
    assert (run / "mine/.metadata").is_file(), "persisted there at the end"
    ignored = {"replica_count": 1, "comm_backend": "gloo", "save_timeout": 600, "local_shard_num": 1}
    with FsdpFullCheckpointer(f"file://{tmp_path}/full", **ignored, global_shard_num=1) as full:
        full.save_checkpoint(1, model, optimizer, {"epoch": 1}, tmp_path / "full.pt")
        assert full.wait_latest_checkpoint(60) == 1
        assert torch.load(tmp_path / "full.pt")["epoch"] == 1
        assert full.load_checkpoint(model, optimizer) == {"epoch": 1}
    assert said.text.count("without effect here") == 1


SIZE = (1 << 31) + 4097


@pytest.mark.campaign
def test_a_tensor_beyond_2_gib_comes_back_from_memory_and_storage(tmp_path: Path):
    """Lengths and places do not fit 32 bits."""
    assert min(shutil.disk_usage(place).free for place in ("/dev/shm", tmp_path)) > 6 * SIZE, "too little room"
    # no two MiB are alike
    large = torch.arange(SIZE // 8 + 1, dtype=torch.int64).mul_(2654435761).view(torch.uint8)[:SIZE]
    state = {"before": torch.ones(3), "large": large, "within": torch.tensor(7)}

    def came_back(**source: Any) -> bool:
        loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load(loaded, **source)
        return all(torch.equal(loaded[name], tensor) for name, tensor in state.items())

    for tier in ("memory", "storage"):
        with FsdpShardCheckpointer(tmp_path / "run") as checkpointer:
            if tier == "memory":
                assert checkpointer.save_checkpoint(1, state, storage_type=StorageType.DISK)
            assert came_back(storage_reader=checkpointer.get_storage_reader()) and checkpointer.loaded_from == tier
    assert came_back(checkpoint_id=tmp_path / "run" / "checkpoint-1"), "by stock DCP"
