"""Resumes at an epoch's end and after an interruption within a validation: Lightning continues as if uninterrupted."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from fastckpt.data import ResumableDataLoader
from fastckpt.lightning import NEWEST
from tests.e2e.lightning.training import Module, samples, trainer_of
from tests.faults.diary import digest

pytestmark = pytest.mark.frameworks


class Interrupted(Exception):
    """What befalls a training."""


class Interrupting(Callback):
    """Ends the training in a validation within an epoch, and as the second epoch begins, each once if they are left."""

    def __init__(self, left: set[str]) -> None:
        self._left = left

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._at("validation", is_here=trainer.global_step == 3)

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self._at("epoch", is_here=trainer.current_epoch == 1)

    def _at(self, place: str, *, is_here: bool) -> None:
        if is_here and place in self._left:
            self._left.remove(place)
            raise Interrupted(place)


class Noting(Callback):
    def __init__(self) -> None:
        self.notes: list[dict[str, Any]] = []

    def note(self, **fields: Any) -> None:
        self.notes.append(fields)

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self.note(epoch=trainer.current_epoch, at=trainer.global_step)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self.note(epoch_ended=trainer.current_epoch, at=trainer.global_step)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.note(validated=trainer.global_step, loss=float(trainer.callback_metrics["val"]).hex())


def noted(folder: Path, *places: str) -> list[dict[str, Any]]:
    """All that happens in a training with early stopping, which is begun again after each interruption."""
    noting, left = Noting(), set(places)
    while True:
        stop = EarlyStopping("val", patience=3, min_delta=1.0)
        best = ModelCheckpoint(str(folder), "{step}-{val:.4f}", monitor="val", save_top_k=2, save_last=True)
        others = (ModelCheckpoint(str(folder), save_on_train_epoch_end=True), Interrupting(left), stop, noting)
        trainer = trainer_of(folder, -1, best, *others, max_epochs=3, val_check_interval=3)
        module, loader = Module("unseeded", noting.note), ResumableDataLoader(samples(32), 4, shuffle=True)
        validation = DataLoader(samples(16), 4, generator=torch.Generator())
        try:
            trainer.fit(module, loader, validation, ckpt_path=NEWEST)
        except Interrupted:
            continue
        kept = {Path(path).name: float(score).hex() for path, score in best.best_k_models.items()}
        weights = digest(module.state_dict())
        noting.note(end=trainer.global_step, weights=weights, waits=stop.wait_count, kept=kept)
        assert not left
        return noting.notes


def test_interruptions_within_a_validation_and_at_the_epochs_end_change_nothing(tmp_path):
    """Early stopping, the best models, the order of each epoch and the losses are those of the undisturbed training."""
    interrupted, undisturbed = noted(tmp_path / "one", "validation", "epoch"), noted(tmp_path / "other")
    assert [line for i, line in enumerate(interrupted) if line not in interrupted[:i]] == undisturbed
    assert [line["validated"] for line in undisturbed if "validated" in line] == [3, 6, 11, 14]


@pytest.mark.parametrize(("model", "validates"), [({}, True), ({"save_on_train_epoch_end": True}, False)])
def test_a_finished_lightning_job_continues_with_more_epochs(tmp_path, model, validates):
    """The weights are those of one that was given all epochs at once."""

    def fit(folder: Path, epochs: int) -> torch.Tensor:
        checkpoints, limit = ModelCheckpoint(folder, "{epoch}", **model), None if validates else 0
        trainer = trainer_of(folder, -1, checkpoints, max_epochs=epochs, limit_val_batches=limit)
        loader, module = ResumableDataLoader(samples(32), 4, shuffle=True), Module("unseeded")
        trainer.fit(module, loader, DataLoader(samples(8), 4, generator=torch.Generator()), ckpt_path=NEWEST)
        assert (trainer.current_epoch, trainer.global_step) == (epochs, 8 * epochs)
        return torch.cat([each.flatten() for each in module.parameters()])

    at_once = fit(tmp_path / "at once", 3)
    fit(tmp_path / "in turn", 1)
    fit(tmp_path / "in turn", 2)
    assert torch.equal(fit(tmp_path / "in turn", 3), at_once)


@pytest.mark.parametrize("validated", [3, 16])
def test_a_file_saved_before_its_validation_or_its_epochs_end_is_named(tmp_path, caplog, validated):
    """Stock Lightning, too, goes on from such a file without what follows."""
    model = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=validated)
    with caplog.at_level(logging.WARNING, "fastckpt"):
        trainer_of(tmp_path, 17, model, val_check_interval=validated).fit(Module())
    assert caplog.text.count(f"saves step {validated} before its validation or its epoch's end") == 1
