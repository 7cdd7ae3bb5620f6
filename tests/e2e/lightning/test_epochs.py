"""Resumes at an epoch's end and after a kill within a validation: Lightning continues as if uninterrupted."""

import json
import logging
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from fastckpt.data import ResumableDataLoader
from fastckpt.lightning import NEWEST
from tests.e2e.lightning.training import Module, samples, trainer_of
from tests.faults.jobs import run_forked

pytestmark = pytest.mark.frameworks

PROGRAM = Path(__file__).with_name("epochs.py")


def test_kills_within_a_validation_and_at_the_epochs_end_change_nothing(tmp_path, forked_launchers):
    """Early stopping, the best models, the order of each epoch and the losses are those of the undisturbed training."""
    shape = ("--nproc_per_node=2", "--max-restarts=3")
    text = run_forked(tmp_path, *shape, PROGRAM, tmp_path, preload="lightning.pytorch")
    assert "weights_only" not in text.replace("weights_only=weights_only", "")  # but in lines of tracebacks
    assert (tmp_path / "validation").exists() and (tmp_path / "epoch").exists() and text.count("restarts left") == 2
    killed, undisturbed = (
        [json.loads(line) for line in (tmp_path / name / "log").read_text().splitlines()]
        for name in ("killed", "undisturbed")
    )
    assert [line for i, line in enumerate(killed) if line not in killed[:i]] == undisturbed
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
