"""Names of the parameters in each group of the optimizers, so that no state goes to another parameter."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, NoReturn

import torch
from torch.nn import Module
from torch.optim import Optimizer

from fastckpt._core.arguments import abbreviated
from fastckpt._core.client.optimizers import state_owner, unwrapped
from fastckpt._core.error_codes import coded
from fastckpt._core.torch_private.tensors import loads_by_place
from fastckpt.errors import ConfigError

Groups = dict[str, list[list[str]]]
"""Text for each group of each optimizer of a part of a state: its parameters, a line each."""

WRAPPERS = "_checkpoint_wrapped_module.", "_orig_mod."
"""Parts of names that come and go with activation checkpoints and compiled modules."""


class ParameterNames:
    """Names the parameters of optimizers, which number them in their states, and compares names with a checkpoint's.

    Args:
        parts: The parts of a state: optimizers, and the modules of their parameters.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        several = {name: part if isinstance(part, Sequence) else (part,) for name, part in parts.items()}
        modules = [(name, each) for name, part in several.items() for each in part if isinstance(each, Module)]
        self._modules = [("" if name == "model" else f"{name}: ", each) for name, each in modules]
        owners = {name: [state_owner(each) for each in part] for name, part in several.items() if part}
        self._optimizers = {
            name: [unwrapped(each) for each in part]
            for name, part in owners.items()
            if all(isinstance(each, Optimizer) for each in part)
        }
        self._known: list[list[torch.Tensor]] = []
        self._groups: Groups = {}

    def groups(self) -> Groups:
        """The names in each group: an empty one for a parameter of no module. Cached while groups stay as they are."""
        now = [group["params"] for each in chain(*self._optimizers.values()) for group in each.param_groups]
        if len(now) != len(self._known) or not all(map(_same, now, self._known)):
            # All names of a tied parameter lead to it; the first one is its own.
            names = {id(parameter): name for name, parameter in reversed(self._named().items())}
            self._known = [list(parameters) for parameters in now]
            self._groups = {
                part: [[_text(group["params"], names) for group in each.param_groups] for each in optimizers]
                for part, optimizers in self._optimizers.items()
            }
        return self._groups

    def check(self, saved: Any) -> None:
        """Raise ConfigError if states in a checkpoint would go to other parameters than those of the same names.

        Earlier versions saved no names, and a renamed model has none in common: there is nothing to compare. An
        optimizer that finds the parameters of states by itself is left alone.
        """
        if not isinstance(saved, Mapping):
            return
        named, now = self._named(), self.groups()
        for part, optimizers in self._optimizers.items():
            for i, (each, old) in enumerate(zip(optimizers, saved.get(part, ()), strict=False)):
                if loads_by_place(each):
                    which = f"{part} {i}" if len(optimizers) > 1 else part
                    self._check(which, each, _lines(old), _lines(now[part][i]), named)

    def _check(
        self, which: str, now: Optimizer, old: list[list[str]], new: list[list[str]], named: Mapping[str, torch.Tensor]
    ) -> None:
        if list(map(len, old)) != list(map(len, new)):
            _refuse_sizes(which, old, new)
        places = ((i, name) for i, group in enumerate(old) for name in group)
        parameters = [parameter for group in now.param_groups for parameter in group["params"]]
        others = [
            (i, name, parameter)
            for (i, name), parameter in zip(places, parameters, strict=True)
            if name in named and named[name] is not parameter
        ]
        if others:
            i, name, parameter = others[0]
            here = next((each for each, value in named.items() if value is parameter), "a parameter of no part")
            raise ConfigError(
                coded(
                    f"{which} was saved with other parameters at these places: the state of {name} in group {i} would "
                    f"go to {here}, and {len(others)} of {len(parameters)} in all. Give its parameters in "
                    f"the order in which they were saved ({abbreviated(old[i])}), or, to start afresh, another "
                    "checkpoint directory",
                    "FC-043",
                )
            )

    def _named(self) -> dict[str, torch.Tensor]:
        return {
            prefix + _plain(name): parameter
            for prefix, module in self._modules
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }


def _same(now: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _text(parameters: Sequence[torch.Tensor], names: Mapping[int, str]) -> str:
    return "".join(names.get(id(parameter), "") + "\n" for parameter in parameters)


def _lines(groups: Sequence[str]) -> list[list[str]]:
    return [group.split("\n")[:-1] for group in groups]


def _refuse_sizes(which: str, old: list[list[str]], new: list[list[str]]) -> NoReturn:
    """Raise ConfigError for groups of other sizes; torch would, without names."""
    before, now = set(chain(*old)) - {""}, set(chain(*new)) - {""}
    lacks, more = abbreviated(sorted(before - now)), abbreviated(sorted(now - before))
    change = "".join([f", without {lacks}" if lacks else "", f", with {more}" if more else ""])
    raise ConfigError(
        coded(
            f"{which} was saved with parameter groups of {_sizes(old)} parameters, and has groups of {_sizes(new)} "
            f"now{change}. Before resume(), give the optimizer that was saved, and its model: parameters that training "
            "unfreezes later may be in a group from the start (docs/guides/changed_script.md); or give another "
            "checkpoint directory",
            "FC-043",
        )
    )


def _sizes(groups: list[list[str]]) -> str:
    return " + ".join(str(len(group)) for group in groups) or "no"
