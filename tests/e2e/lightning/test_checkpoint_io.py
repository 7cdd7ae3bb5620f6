"""One process with Lightning: files that it names, keeps and removes, and refused calls."""

import logging
import pickle
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from fastckpt._core.format.ids import SaveId
from fastckpt._core.policy.lineage import PASSED_OVER
from fastckpt._core.snapshot import mutation_check
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import BadCheckpoint, ConfigError
from fastckpt.lightning import (
    NEWEST,
    FastCheckpointIO,
    FastDDPStrategy,
    FastSingleDeviceStrategy,
    MemoryCheckpoint,
    StorageType,
)
from fastckpt.lightning.checkpoint_removal import Removal
from tests.e2e.lightning.training import Module, trainer_for, trainer_of
from tests.e2e.mistakes.table import group_of_one, sharded_by_zero
from tests.unit._core.storage.checkpoints import ids, publish

pytestmark = pytest.mark.frameworks


def of_each_fourth(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1, save_last="link")


def fit(folder: Path, steps: int, path: str = NEWEST) -> Trainer:
    trainer = trainer_of(folder, steps, of_each_fourth(folder))
    trainer.fit(Module(), ckpt_path=path)
    return trainer


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix in (".ckpt", "") and path.name != ".fastckpt"}


def test_checkpoint_files_are_written_when_training_ends_and_load(tmp_path):
    """Also the newest of all, in a trainer that validates before it trains."""
    assert (
        len(trainer_of(tmp_path, 1, of_each_fourth(tmp_path)).validate(Module(), ckpt_path=NEWEST, verbose=False)) == 1
    )
    trainer = fit(tmp_path, 9)
    assert trainer.strategy.checkpoint_io.loaded_step == -1, "nothing was saved"
    assert {"step=4.ckpt", "step=8.ckpt"} <= names(tmp_path)
    assert torch.load(tmp_path / "step=4.ckpt", weights_only=True)["global_step"] == 4
    assert trainer.validate(ckpt_path=str(tmp_path / "step=4.ckpt"), verbose=False)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in torch.load(tmp_path / "weights.ckpt"), "nothing to go on from"
    trainer = fit(tmp_path, 9)
    weights, expected = trainer.lightning_module.state_dict(), trainer.validate(trainer.lightning_module, verbose=False)
    other, module = trainer_of(tmp_path, 12, of_each_fourth(tmp_path)), Module()
    assert other.validate(module, ckpt_path=NEWEST, verbose=False) == expected
    assert all(torch.equal(weights[name], tensor) for name, tensor in module.state_dict().items())
    other.fit(module, ckpt_path=NEWEST)
    assert (other.strategy.checkpoint_io.loaded_step, other.global_step) == (9, 12), "what memory had was flushed"
    assert "checkpoint-9" not in names(tmp_path), "and was replaced by newer ones"
    assert fit(tmp_path, 10, str(tmp_path / "step=8.ckpt")).strategy.checkpoint_io.loaded_step == 8


def test_an_optimizer_that_no_rank_has_whole_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Module, "configure_optimizers", sharded_by_zero)
    with group_of_one(), pytest.raises(ConfigError, match="Give a torch optimizer, such as AdamW"):
        fit(tmp_path, 1)


def test_damage_of_a_lightning_checkpoint_is_detected(tmp_path):
    fit(tmp_path, 8)
    path = tmp_path / "step=8.ckpt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadCheckpoint):
        fit(tmp_path, 9, str(path))
    assert fit(tmp_path, 9).strategy.checkpoint_io.loaded_step == 4


def test_the_plugin_without_a_launcher_saves_and_resumes_with_one_rank(tmp_path):
    model = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    for steps, loaded in ((4, -1), (6, 4)):
        io = FastCheckpointIO(tmp_path)
        stock = {"strategy": SingleDeviceStrategy(torch.device("cpu")), "plugins": [io]}
        trainer_for(steps, model, use_distributed_sampler=False, **stock).fit(Module(), ckpt_path=NEWEST)
        assert io.loaded_step == loaded


class Weights(Callback):
    def __init__(self) -> None:
        self.after: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: object) -> None:
        self.after[trainer.global_step] = {name: each.clone() for name, each in module.state_dict().items()}


def test_saves_beside_swapped_average_weights_hold_the_right_weights(tmp_path, monkeypatch, caplog):
    """For each validation, and at the end of training: right after saves, while these would be copied."""
    monkeypatch.setattr(mutation_check, "WORTH", 1)
    monkeypatch.setattr(logging.getLogger("fastckpt"), "propagate", True)
    weights, model = Weights(), ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    ours = {"plugins": [FastCheckpointIO(tmp_path, overlap=True)], "val_check_interval": 2}
    trainer_of(tmp_path, 8, model, EMAWeightAveraging(decay=0.5), weights, **ours).fit(Module())
    for step in (2, 4, 6, 8):
        saved = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["current_model_state"]
        for name, each in weights.after[step].items():
            assert torch.equal(saved[name], each), (step, name)
    assert "was written to" not in caplog.text and "WeightAveraging" in caplog.text


def test_unsupported_calls_of_lightning_are_refused(tmp_path, monkeypatch):
    io = FastCheckpointIO(tmp_path)
    with pytest.raises(TypeError, match="give None"):
        io.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt", {"some": "option"})
    with pytest.raises(ConfigError, match="every_n_train_steps is 0"):
        MemoryCheckpoint(0)
    model = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    with pytest.raises(ConfigError, match="plugins="):
        trainer_for(1, model, strategy=FastSingleDeviceStrategy(torch.device("cpu"))).fit(Module())
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="FastDDPStrategy"):
        io.save_checkpoint({"global_step": 1, "optimizer_states": []}, tmp_path / "a.ckpt", StorageType.MEMORY)
    assert FastDDPStrategy.__mro__[1].__name__ == "AllRanks"


def test_a_file_to_read_loads_as_the_plugin_was_told(tmp_path: Path):
    file = tmp_path / "file.ckpt"
    torch.save({"note": tmp_path}, file)
    safe, trusting = (FastCheckpointIO(tmp_path, weights_only=each) for each in (True, False))
    assert safe.load_checkpoint(file, weights_only=False) == trusting.load_checkpoint(file) == {"note": tmp_path}
    with pytest.raises(pickle.UnpicklingError, match="PosixPath"):
        safe.load_checkpoint(file)


def test_paths_of_a_loaded_state_outside_and_what_a_resume_passed_over_are_left(tmp_path):
    """ModelCheckpoint may ask for removals in the checkpoint directory, and of what this process saved."""
    removal, directory, found = Removal(), CheckpointDirectory(tmp_path / "run"), list[str]()
    for step in (1, 2, 3):
        publish(directory, SaveId(1, step), **({PASSED_OVER: [[1, 1]]} if step == 3 else {}))
    (tmp_path / "thesis").mkdir()
    for path in (tmp_path / "thesis", f"{directory.path}/../thesis", directory.path / "epoch=1.ckpt", tmp_path / "run"):
        removal.remove(str(path))
    for step in (1, 2):
        removal.remove(str(directory.path / f"checkpoint-{step}"))
    removal.keep(str(tmp_path / "mine.ckpt"))  # saved there by this process
    removal.remove(str(tmp_path / "mine.ckpt"))
    for _ in range(2):
        removal.carry_out(str(directory.path), found.append, is_busy=False)
        assert found == [str(tmp_path / "mine.ckpt"), f"{directory.path}/epoch=1.ckpt"]
    assert ids(directory) == [(1, 3), (1, 1)]
