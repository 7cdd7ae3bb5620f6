"""Settings of a script that was changed between launches: what a resume takes, reports and leaves."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from fastckpt.checkpointer.script_settings import ScriptSettings
from fastckpt.data import ResumableDataLoader
from fastckpt.errors import ConfigError


class Script:
    """A model with two groups, a schedule and a loader."""

    def __init__(self, lr: float = 0.1, schedule: Any = None, *, seed: int = 0, batch: int = 4, **options: Any) -> None:
        self.model = nn.Linear(2, 2)
        groups: list[Any] = [{"params": [self.model.weight]}, {"params": [self.model.bias], "lr": lr / 2}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, **options)
        self.scheduler = schedule(self.optimizer) if schedule else ()
        self.loader = ResumableDataLoader(range(64), batch, True, seed=seed)
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.settings = ScriptSettings(parts, self.loader)

    def train(self, steps: int) -> "Script":
        for _ in range(steps):
            self.optimizer.step()
            if self.scheduler:
                self.scheduler.step()
        return self

    def resume(self, other: "Script", *names: str) -> str:
        self.settings.note(names, 0, None)
        self.optimizer.load_state_dict(deepcopy(other.optimizer.state_dict()))
        if self.scheduler:
            self.scheduler.load_state_dict(deepcopy(other.scheduler.state_dict()))
        self.loader.load_state_dict(other.loader.state_dict())
        self.settings.apply(1, other.settings.left)
        return self.settings.describe()[1]

    @property
    def rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]


def cosine(length: int) -> Callable[[Any], Any]:
    return lambda optimizer: schedules.CosineAnnealingLR(optimizer, length)


def sequence(length: int) -> Callable[[Any], Any]:
    return lambda it: schedules.SequentialLR(it, [schedules.LinearLR(it, 0.1, 1.0, 3), cosine(length)(it)], [3])


def test_what_the_checkpoint_replaced_and_what_it_left_is_reported():
    saved = Script(0.001, cosine(5), weight_decay=0.5).train(2)
    assert Script(0.001, cosine(5), weight_decay=0.5).resume(saved) == "", "a schedule under way is no change"
    script = Script(7e-5, cosine(50), seed=3, batch=8, betas=(0.8, 0.9))
    script.model.bfloat16()
    parts = {"model": script.model, "optimizer": script.optimizer, "scheduler": script.scheduler}
    script.settings = ScriptSettings(parts, script.loader)
    assert script.resume(saved) == (
        "of the checkpoint: lr 0.001, 0.0005 (script: 7e-05, 3.5e-05), betas (0.9, 0.999) (script: (0.8, 0.9)), "
        "weight_decay 0.5 (script: 0.01), T_max 5 (script: 50), seed 0 (script: 3); "
        "of the script: dtype bfloat16 (checkpoint: float32), batch_size 8 (checkpoint: 4); "
        "resume(from_script=['lr', 'betas', 'weight_decay', 'T_max', 'seed']) goes on with the script's"
    )


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (cosine(4), cosine(50)),  # whose rate is 0 by then
        (sequence(20), sequence(50)),
        (lambda it: schedules.MultiStepLR(it, [2, 6]), lambda it: schedules.MultiStepLR(it, [3, 7], 0.5)),
        (lambda it: schedules.OneCycleLR(it, 0.5, total_steps=30), lambda it: schedules.OneCycleLR(it, 2.0, 30)),
        (lambda it: schedules.ChainedScheduler([schedules.ExponentialLR(it, 0.9), schedules.StepLR(it, 3)]),) * 2,
    ],
    ids=["at its end", "sequence", "milestones", "one cycle", "chained"],
)
def test_a_schedule_of_the_script_goes_on_as_if_it_had_been_the_first(saved: Any, now: Any):
    script, whole = Script(0.3, now), Script(0.3, now)
    arguments = [name for name in ("T_max", "milestones", "gamma") if name in script.settings._read()]
    assert script.resume(Script(0.1, saved).train(4), "lr", *arguments) == ""
    for _ in range(6):
        assert script.train(1).rates == pytest.approx(whole.rates if whole.train(1 if _ else 5) else [])
    assert script.scheduler.get_last_lr() == pytest.approx(script.rates)


def test_settings_without_a_schedule_and_in_tensors_are_the_scripts():
    script = Script(0.3, weight_decay=0.7)
    script.resume(Script(0.1).train(3), "lr", "weight_decay")
    assert script.rates == [0.3, 0.15] and script.optimizer.param_groups[1]["weight_decay"] == 0.7
    saved, script = Script(), Script()
    for each, rate in (saved, 0.1), (script, 0.3):
        each.optimizer.param_groups[0] |= {"lr": torch.tensor(rate), "capturable": True}
    assert script.resume(saved).startswith("of the checkpoint: lr 0.1")
    assert script.resume(saved, "lr") == "" and script.rates[0].item() == pytest.approx(0.1), "it has set 0.1 by then"


def test_another_seed_takes_effect_at_the_same_place_of_the_epoch():
    saved, other = Script(), Script(seed=5)
    batches = iter(saved.loader)
    for _ in range(3):
        next(batches)
    rest = [each.tolist() for each in batches]
    again = Script()
    next(iter(again.loader))
    assert "seed 0 (script: 5)" in Script(seed=5).resume(again)
    assert other.resume(again, "seed") == "" and other.loader.state_dict()["cursor"] == 4
    found = [each.tolist() for each in other.loader]
    assert len(found) == 15 and found[2:] != rest
    fresh = [each.tolist() for each in Script(seed=5).loader]
    assert found == fresh[1:], "as if this seed had been there from the start"


def test_settings_that_the_script_has_not_are_refused_before_anything_is_loaded():
    script = Script()
    for names, says in (("lr", r"give names, such as \['lr'\]"), (["T_max"], "'T_max'; this script sets amsgrad, ")):
        with pytest.raises(ConfigError, match=says):
            script.settings.note(names, 0, None)
    with pytest.raises(ConfigError, match="did you mean 'seed'"):
        script.settings.note(["seeds"], 0, None)
