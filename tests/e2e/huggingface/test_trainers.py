"""Trainers of one process, as a script that no launcher started makes them: one after the other, and failed ones."""

import json
import os
import shutil
import signal
import time
import types
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, TrainerCallback

from fastckpt.huggingface import FastCheckpointTrainer, get_last_checkpoint
from tests.e2e.huggingface.stock import Sentences, digest
from tests.e2e.huggingface.train import trained, trainer_of
from tests.faults.conftest import FRAMEWORKS, new_job  # noqa: F401 (a fixture)
from tests.faults.table import TRAINER

pytestmark = pytest.mark.frameworks

BEST = ["load_best_model_at_end=true", 'metric_for_best_model="loss"', "greater_is_better=false"]


def weights(trainer: Any) -> str:
    return digest(dict(trainer.model.state_dict()))


def kept(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("checkpoint-*")}


def log_of(checkpoint: Path) -> list[dict[str, Any]]:
    lines = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [
        {name: each for name, each in line.items() if "runtime" not in name and "second" not in name} for line in lines
    ]


def test_the_best_saved_model_is_kept_though_an_unsaved_one_was_better(tmp_path):
    """Step 6 is the best, and is evaluated only; of those that are saved step 4 is."""
    script = ["--steps", "12", "--disk", "4", "--eval", "2", "--best", "6", "--set", *BEST, "save_total_limit=1"]
    theirs, ours = (trained(tmp_path / name, *script, ours=name == "ours") for name in ("theirs", "ours"))
    assert kept(tmp_path / "ours") == kept(tmp_path / "theirs") == {"checkpoint-4"}
    assert weights(theirs) == weights(ours)
    assert ours.state.best_model_checkpoint == str(tmp_path / "ours" / "checkpoint-4")


def test_the_last_checkpoint_is_persisted_though_storage_is_slow(tmp_path, monkeypatch):
    """Those before it are being persisted, and no memory is free for it."""
    sync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (time.sleep(0.3), sync(descriptor)))
    trained(tmp_path, "--steps", "12", "--disk", "4")
    assert "checkpoint-12" in kept(tmp_path)


class Failing(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise ArithmeticError(f"at step {self.step}")


def failed_at(folder: Path, step: int, *script: str) -> FastCheckpointTrainer:
    trainer = trainer_of(folder, *script)
    trainer.add_callback(Failing(step))
    with pytest.raises(ArithmeticError):
        trainer.train(resume_from_checkpoint=True)
    return trainer


def test_after_a_failure_the_same_or_another_trainer_resumes(tmp_path, monkeypatch):
    """Between two lines of the log: its loss is that of the steps since."""
    reference, script = trained(tmp_path / "theirs", ours=False), ("--set", "logging_steps=3")
    monkeypatch.chdir(tmp_path)
    failed = failed_at(tmp_path / "ours", 4, *script)
    assert failed.loaded_step == -1
    with pytest.raises(ArithmeticError):
        failed.train(resume_from_checkpoint=True)
    assert failed.loaded_step == 4
    newest = get_last_checkpoint(tmp_path / "ours")
    assert newest == str(tmp_path / "ours" / "checkpoint-4")
    other = trainer_of(tmp_path / "ours", *script)
    resumed = other.train(resume_from_checkpoint=newest)
    assert other.loaded_step == 4
    assert weights(other) == weights(reference)
    assert trained(tmp_path / "ours", *script, resume="./ours/checkpoint-3/").loaded_step == 3, (
        "an older one by its name"
    )
    losses = [loss["loss"] for loss in reference.state.log_history if "loss" in loss]
    assert resumed.training_loss == pytest.approx(sum(losses[4:]) / 2, rel=1e-4)


def test_save_only_model_keeps_the_optimizer_in_memory_and_warns_from_storage(tmp_path, caplog):
    """A failure loses nothing; what goes on from storage alone is told that its optimizer is new."""
    reference, only = (
        trained(tmp_path / "theirs", ours=False),
        ("--set", "save_only_model=true", "save_total_limit=1"),
    )
    failed_at(tmp_path / "ours", 3, *only, "--memory", "0")
    again = trained(tmp_path / "ours", *only, resume=True)
    assert again.loaded_step == 3
    assert weights(again) == weights(reference)
    assert kept(tmp_path / "ours") == {"checkpoint-6"}
    assert not [*(tmp_path / "ours/checkpoint-6").glob("optimizer*")]
    assert "has the model alone" not in caplog.text
    trained(tmp_path / "ours", "--steps", "8", *only, resume=True)
    assert "step 6 has the model alone" in caplog.text


class Asking(TrainerCallback):
    """Asks the trainer in the middle, as scripts for Flash Checkpoint do."""

    def __init__(self, trainer: FastCheckpointTrainer) -> None:
        self.trainer, self.found = trainer, list[str | None]()

    def on_step_end(self, args, state, control, **_):
        self.trainer.wait_latest_checkpoint(60)
        self.found.append(self.trainer.get_last_checkpoint())


def test_methods_of_flash_checkpoint_report_what_is_durable_and_one_of_the_model_is_called(tmp_path):
    def save_pretrained(self: Any, folder: Any, **options: Any) -> None:
        type(self).save_pretrained(self, folder, **options)
        Path(folder, "of_model.txt").write_text("own")

    trainer = trainer_of(tmp_path)
    trainer.model.save_pretrained = types.MethodType(save_pretrained, trainer.model)
    trainer.add_callback(asking := Asking(trainer))
    assert trainer.get_last_checkpoint() is None
    trainer.train()
    names = [tmp_path / f"checkpoint-{step}" for step in range(1, 7)]
    assert asking.found[0] is None and asking.found[-1] in map(str, names[:5])
    trainer.wait_latest_checkpoint()
    assert trainer.get_last_checkpoint() == str(names[5])
    assert (names[5] / "of_model.txt").exists() and (names[5] / "model.safetensors").exists()


class Stream(IterableDataset):
    """Nobody knows how long it is."""

    def __iter__(self) -> Any:
        return iter([Sentences(5, 24)[index] for index in range(24)])


@pytest.mark.campaign
def test_the_last_step_of_an_epoch_of_unknown_length_is_saved(tmp_path):
    """Memory has its last step when it turns out to be the last, and is evaluated."""
    script = ("--steps", "8", "--set", 'save_strategy="epoch"', 'eval_strategy="epoch"')
    for name in ("theirs", "ours"):
        trainer = trainer_of(tmp_path / name, *script, ours=name == "ours")
        trainer.train_dataset = Stream()
        trainer.train()
    assert kept(tmp_path / "ours") == kept(tmp_path / "theirs") >= {"checkpoint-6"}
    for each in kept(tmp_path / "ours"):
        assert log_of(tmp_path / "ours" / each) == log_of(tmp_path / "theirs" / each), each


@pytest.mark.campaign
def test_a_trainer_goes_on_with_other_ranks_and_from_the_checkpoint_that_it_is_named(new_job):  # noqa: F811
    """get_last_checkpoint finds what is in memory alone, after both ranks and the agent were killed."""
    job, options = new_job(), {"program": TRAINER, "FASTCKPT_PRELOAD": "auto", **FRAMEWORKS}
    job.start("--kill-after", "5", "--memory", "1", "--resume", "last", **options)
    assert job.wait() == -signal.SIGKILL and not [*job.checkpoint_dir.glob("checkpoint-*")]
    job.run("--resume", "last", "--steps", "10", **options)
    job.run("--steps", "12", ranks=1, **options)
    assert job.resumes() == [(0, ""), (5, "memory"), (10, "storage")]


class Losing(TrainerCallback):
    """At step 8 the best checkpoint is lost, or a resume has not found it on storage yet."""

    def __init__(self, trainer: FastCheckpointTrainer, *, files: bool) -> None:
        self.trainer, self.files = trainer, files

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 8 and self.files:
            self.trainer.wait_latest_checkpoint(60)
            shutil.rmtree(state.best_model_checkpoint)
        elif state.global_step == 8:
            state.best_model_checkpoint = None


@pytest.mark.campaign
@pytest.mark.parametrize("files", [True, False])
def test_the_best_model_is_loaded_at_the_end_only_if_it_is_still_there(tmp_path, files):
    best = [*BEST, 'save_strategy="best"', "save_total_limit=1"]
    trainer = trainer_of(tmp_path, "--steps", "12", "--memory", "0", "--eval", "2", "--best", "4", "--set", *best)
    trainer.add_callback(Losing(trainer, files=files))
    trainer.train()
    found = trainer.state.best_model_checkpoint
    assert found == (None if files else str(tmp_path / "checkpoint-4"))
    if found:
        loaded = AutoModelForCausalLM.from_pretrained(found)
        assert digest(dict(loaded.state_dict())) == weights(trainer)
