"""Settings of the script that a checkpoint replaces: compared at a resume, reported, and kept where that is asked."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from fastckpt._core.arguments import abbreviated, count, meant, shown
from fastckpt._core.client.optimizers import state_owner, unwrapped
from fastckpt._core.torch_private.schedulers import closed_form, schedulers_within, set_last_rates
from fastckpt.errors import ConfigError

SCRIPT = "script"
"""Key, in a checkpoint, of the settings of the script that a resume leaves as they are."""
SEED, RATE, FIRST_RATE = "seed", "lr", "initial_lr"
_NO_OPTIONS = {"params", "param_names", RATE, FIRST_RATE}
_CYCLED = {"momentum", "betas"}
"""Options that schedules with a ``max_momentum`` change in each step."""
_PROGRESS = {"self", "optimizer", "last_epoch", "schedulers"}
"""Arguments of schedulers that are none of their settings."""
_RATES = "base_lrs", "max_lrs", "min_lrs"
"""Attributes of schedulers that follow from learning rates of the script."""


class ScriptSettings:
    """Reads the script's settings of its optimizers, schedulers and loaders, and sets them again after a load.

    Args:
        parts: The parts of the state by name, as the user gave them.
        data: The loader of the batches, if any.
    """

    def __init__(self, parts: Mapping[str, Any], data: Any) -> None:
        several = [each for part in parts.values() for each in (part if isinstance(part, Sequence) else (part,))]
        owners = [state_owner(each) for each in several]
        self._optimizers = [*{id(each): unwrapped(each) for each in owners if isinstance(each, Optimizer)}.values()]
        self._schedulers = [each for each in several if isinstance(getattr(each, "optimizer", None), Optimizer)]
        self._schedulers = [each for each in self._schedulers if not isinstance(each, Optimizer)]
        self._loaders = [each for each in (data, *several) if hasattr(each, "set_seed")]
        self._data = data
        dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in _parameters(parts["model"])})
        size = getattr(data, "batch_size", None)
        self.left = {"dtype": " and ".join(dtypes)} | ({"batch_size": size} if isinstance(size, int) else {})
        """Settings that a resume leaves as the script has them."""
        self._given: dict[str, list[Any]] = {}
        self._saved: Mapping[str, Any] = {}
        self._wanted, self._skip = frozenset[str](), 0
        self._back_to: int | None = None
        self._rates: list[tuple[Any, str, Any]] = []

    def note(self, wanted: Collection[str], skip: object, step: int | None) -> None:
        """Note the script's settings before a load, and its requests; raises ConfigError for an impossible one.

        Args:
            wanted: Names of settings of the script to set again after the load.
            skip: Batches to skip after ``step``.
            step: The one that it goes back to, if it does.
        """
        self._given = self._read()
        within = (each for scheduler in self._schedulers for each in schedulers_within(scheduler))
        rates = ((each, name, vars(each).get(name)) for each in within for name in _RATES)
        self._rates = [(each, name, list(rate)) for each, name, rate in rates if isinstance(rate, list)]
        if isinstance(wanted, str):
            raise ConfigError(f"from_script is {shown(wanted)}; give names, such as [{wanted!r}]")
        if unknown := [each for each in wanted if each not in self._given]:
            raise ConfigError(
                f"from_script has {shown(unknown[0])}{meant(unknown[0], self._given)}; this script sets "
                f"{abbreviated(sorted(self._given))}"
            )
        self._wanted, self._back_to, self._skip = frozenset(wanted), step, 0
        if skip:
            self._skip = count("skip", skip, "resume(step=..., skip=...)")
            if step is None or not hasattr(self._data, "skip"):
                raise ConfigError(
                    f"skip is {skip}, and {'step is None' if step is None else 'data cannot skip'}; give the step "
                    "after which batches are skipped, and a ResumableDataLoader as data"
                )

    def apply(self, step: int, saved: Any) -> None:
        """Set the script's kept settings after a load; a schedule goes on as the script's does at its step.

        Schedules that compute each rate from the one before go on from the saved one, times how much the first changed.

        Args:
            step: The one that was loaded: batches are skipped after that which the script goes back to, and no other.
            saved: Result of `left` in the checkpoint; None if it is of an earlier version.
        """
        self._saved = saved if isinstance(saved, Mapping) else {}
        names = {*self._wanted, *(("max_lr", "min_lr") if RATE in self._wanted else ())}
        groups = [group for each in self._optimizers for group in each.param_groups]
        firsts = [group.get(FIRST_RATE) for group in groups]
        for name in names & self._given.keys():
            for (_, owner, key), value in zip(self._places(name), self._given[name], strict=False):
                _put(owner, key, value)
        if RATE in names:
            for group, first in zip(groups, firsts, strict=True):
                _scale(group, first)
            for scheduler, name, rates in self._rates:
                vars(scheduler)[name] = list(rates)
        if names & {RATE, *(name for name, *_ in self._arguments())}:
            self._follow_schedules()
        self._apply_to_data(step)

    def describe(self) -> tuple[str, str]:
        """The position in the data; settings that differ between script and checkpoint. Both may be empty."""
        now = self._read()
        replaced = [name for name, value in self._given.items() if name in now and now[name] != value]
        taken = [f"{name} {_text(now[name])} (script: {_text(self._given[name])})" for name in replaced]
        kept = [
            f"{name} {value} (checkpoint: {self._saved[name]})"
            for name, value in self.left.items()
            if name in self._saved and self._saved[name] != value
        ]
        texts = [f"of the checkpoint: {abbreviated(taken)}"] if taken else []
        texts += [f"of the script: {abbreviated(kept)}"] if kept else []
        texts += [f"resume(from_script={replaced}) goes on with the script's"] if taken else []
        return self._place(), "; ".join(texts)

    def _place(self) -> str:
        state = self._data.state_dict() if hasattr(self._data, "rank_state_dict") else {}
        if not {"epoch", "cursor"} <= state.keys():
            return ""
        of = f" of {state['length']}" if state.get("length") else ""
        return f" (epoch {state['epoch']}, sample {state['cursor']}{of})"

    def _read(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for name, owner, key in self._places():
            found.setdefault(name, []).append(_plain(owner[key]))
        if self._loaders:
            found[SEED] = [loader.seed for loader in self._loaders]
        return found

    def _places(self, wanted: str = "") -> Iterator[tuple[str, MutableMapping[str, Any], str]]:
        """The name of each setting, its owner, and its name there; of all, or of the name that is wanted."""
        for name, owner, key in (*self._options(), *self._arguments()):
            if wanted in ("", name) and _is_plain(owner[key]):
                yield name, owner, key

    def _options(self) -> Iterator[tuple[str, MutableMapping[str, Any], str]]:
        for group in (group for each in self._optimizers for group in each.param_groups):
            yield RATE, group, FIRST_RATE if FIRST_RATE in group else RATE
            left_out = _NO_OPTIONS | (_CYCLED if "max_momentum" in group else set())
            yield from ((key, group, key) for key in group if key not in left_out)

    def _arguments(self) -> Iterator[tuple[str, MutableMapping[str, Any], str]]:
        for scheduler in (each for part in self._schedulers for each in schedulers_within(part)):
            names = signature(type(scheduler).__init__).parameters.keys() - _PROGRESS
            yield from ((key.strip("_"), vars(scheduler), key) for key in vars(scheduler) if key.strip("_") in names)

    def _apply_to_data(self, step: int) -> None:
        if SEED in self._wanted:
            for loader, seed in zip(self._loaders, self._given[SEED], strict=True):
                loader.set_seed(seed)
        if self._skip and step == self._back_to:
            self._data.skip(self._skip)

    def _follow_schedules(self) -> None:
        """Set the rates that schedules have at their steps, where these are known without those of the steps before."""
        alone = Counter(id(each.optimizer) for each in self._schedulers)
        for scheduler in self._schedulers:
            groups = scheduler.optimizer.param_groups
            if (rates := closed_form(scheduler)) and alone[id(scheduler.optimizer)] == 1:
                for group, rate in zip(groups, rates, strict=True):
                    _put(group, RATE, rate)
            set_last_rates(scheduler, [group[RATE] for group in groups])


def _parameters(part: Any) -> Iterator[torch.Tensor]:
    for each in part if isinstance(part, Sequence) else (part,):
        if isinstance(each, Module):
            yield from each.parameters()


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | Counter):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _plain(value: Any) -> Any:
    """A copy that compares, whatever is done with the original."""
    if isinstance(value, Counter):
        return Counter(value)
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))  # a list may come back as a tuple, and the other way round
    return value.item() if _is_number(value) else value


def _put(owner: MutableMapping[str, Any], key: str, value: Any) -> None:
    now = owner.get(key)
    if isinstance(now, torch.Tensor):
        now.fill_(value)  # captured by graphs
    else:
        owner[key] = list(value) if isinstance(now, list) else value


def _scale(group: MutableMapping[str, Any], first: Any) -> None:
    """Scale a rate as much as the first of its schedule has changed; without a schedule it is the script's."""
    if first is not None:
        _put(group, RATE, group[RATE] * group[FIRST_RATE] / first if first else group[FIRST_RATE])


def _text(values: Sequence[Any]) -> str:
    """The value of all groups, or that of each."""
    texts = [str([*each.elements()] if isinstance(each, Counter) else each) for each in values]
    return texts[0] if len({*texts}) == 1 else abbreviated(texts)
