"""The names of an optimizer's parameters, saved and compared, whatever may change without harm."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from fastckpt.checkpointer.gradients import Gradients
from fastckpt.checkpointer.parameter_names import ParameterNames
from fastckpt.checkpointer.state import OWN, PARAMETERS, TrainingState
from fastckpt.errors import ConfigError


class Net(nn.Module):
    def __init__(self, renamed: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        setattr(self, "renamed" if renamed else "third", nn.Linear(4, 4))


def names(model: nn.Module, groups: Iterable[Any]) -> ParameterNames:
    return ParameterNames({"model": model, "optimizer": torch.optim.AdamW(groups)})


def saved(model: nn.Module | None = None) -> Any:
    model = model or Net()
    return names(model, model.parameters()).groups()


def test_each_group_has_the_names_of_its_parameters_and_follows_a_group_that_is_added():
    model = Net()
    optimizer = torch.optim.SGD(model.first.parameters())
    own, scheduler = nn.Parameter(torch.zeros(1)), torch.optim.lr_scheduler.StepLR(optimizer, 3)
    known = ParameterNames({"model": model, "optimizer": [optimizer], "scheduler": scheduler})
    assert known.groups() == {"optimizer": [["first.weight\nfirst.bias\n"]]}
    assert known.groups() is known.groups(), "cached"
    optimizer.add_param_group({"params": [own, model.second.bias]})
    assert known.groups() == {"optimizer": [["first.weight\nfirst.bias\n", "\nsecond.bias\n"]]}
    known.check(known.groups())


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (lambda m: [*m.second.parameters(), *m.first.parameters(), *m.third.parameters()], "first.weight .* 4 of 6"),
        (lambda m: copy.deepcopy(m).parameters(), "would go to a parameter of no part"),
        (lambda m: [*m.first.parameters()], "groups of 6 parameters, .* 2 now, without second.bias, second.weight"),
        (lambda m: [{"params": [*m.parameters()][:2]}, {"params": [*m.parameters()][2:]}], "of 2 . 4 now"),
    ],
    ids=["order", "another model's", "fewer", "groups"],
)
def test_states_that_would_go_to_other_parameters_are_refused_by_name(order: Callable[[Any], Any], says: str):
    model = Net()
    with pytest.raises(ConfigError, match=rf"optimizer was saved with .*{says}.*(in the order|optimizer that was)"):
        names(model, order(model)).check(saved())


def test_what_finds_its_own_parameters_or_was_renamed_or_saved_without_names_is_not_compared():
    model = Net(renamed=True)
    names(model, model.parameters()).check(saved())
    model = Net()
    names(model, reversed([*model.parameters()])).check(None)  # an earlier version's
    apply_activation_checkpointing(model, check_fn=lambda each: each is model.first)
    names(model, model.parameters()).check(saved())
    tied = Net()
    tied.second.weight = tied.first.weight
    again = copy.deepcopy(tied)
    # The tied weight's first name stays, the other biases' do not.
    again.first, again.second = again.second, again.first
    names(again, [*again.first.parameters(), again.second.bias, *again.third.parameters()]).check(saved(tied))
    optimizer = torch.optim.AdamW(reversed([*model.parameters()]))
    optimizer.register_load_state_dict_pre_hook(lambda *_: None)
    ParameterNames({"model": model, "optimizer": optimizer}).check(saved())


def test_nothing_is_changed_by_a_load_that_is_refused():
    def state(model: nn.Module, parameters: Iterable[Any]) -> TrainingState:
        parts: Any = {"model": model, "optimizer": torch.optim.AdamW(parameters)}
        return TrainingState(parts, None, Gradients(model, [], None, saved=False))

    model, other = Net(), Net()
    first, second = state(model, model.parameters()), state(other, reversed([*other.parameters()]))
    before = copy.deepcopy(other.state_dict())
    common = first.common() | {OWN: {PARAMETERS: first.parameters.groups()}}
    with pytest.raises(ConfigError, match="would go to"):
        second.load(common, {})
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    first.load(common, {})
