"""Parts of a state that are sharded, which torch gathers and puts back: a module, and its optimizers."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import Parameter, signature
from itertools import islice
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.optim import Optimizer

from fastckpt._core.client.optimizers import dtypes_kept, options_kept
from fastckpt._core.torch_private.sharding import (
    EXTRA_STATE,
    ShardedTensor,
    asks_rank_0,
    flatten_state_dict,
    reduces_gradients,
    set_element,
    tree_leaves,
)
from fastckpt._core.torch_private.tensors import local_part
from fastckpt.errors import ConfigError

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
"""Entries of the state of an optimizer."""


class ShardedState(dict[str, Any]):
    """A state of shards."""


@runtime_checkable
class ShardedPart(Protocol):
    """A part with a state of shards.

    Attributes:
        name: The part's, in the state that is saved.
        nbytes: Bytes of the shards that this rank has, as it has them.
    """

    name: str

    @property
    def nbytes(self) -> int: ...  # noqa: D102

    def state_dict(self) -> ShardedState:
        """State to save; for FSDP1 all ranks call it together."""
        ...

    def target(self, metadata: Metadata) -> ShardedState:
        """State to load into, for a checkpoint with these metadata."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], *, full: bool = False) -> None:
        """Take over a target that was loaded, or a state that is ``full``."""
        ...


class ShardedModel:
    """A module of which each rank has shards.

    Args:
        name: The part's.
        model: The module.
        gradients: Whether its gradients are saved with it, and so must be sharded, too.
    """

    def __init__(self, name: str, model: Module, *, gradients: bool = False) -> None:
        self.name = name
        self._model, self._gradients = model, gradients

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters and buffers on this rank."""
        return _bytes((*self._model.parameters(), *self._model.buffers()))

    def state_dict(self) -> ShardedState:
        """Shards by torch's names for parameters, without wrappers; raises ConfigError if gradients are not shards."""
        if self._gradients and any(map(_keeps_gradients_back, self._model.modules())):
            raise ConfigError(
                "gradients=True: set_requires_gradient_sync(False) keeps gradients where they cannot be saved. Call "
                "step() after updates only, or give the loader accumulate=, or let all micro-batches be reduced"
            )
        return ShardedState(get_model_state_dict(self._model))

    def target(self, metadata: Metadata) -> ShardedState:
        """Its shards, independent of the checkpoint; an extra state is of any size that ``set_extra_state`` takes."""
        state = self.state_dict()
        for name, path in (metadata.planner_data or {}).items():
            if path[0] == self.name and str(path[-1]).endswith(EXTRA_STATE) and path[1] in state:
                state[path[1]] = empty(metadata.state_dict_metadata[name])
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, full: bool = False) -> None:
        """Take over shards, or a ``full`` state; raises the errors of torch's ``load_state_dict``."""
        set_model_state_dict(self._model, dict(state), options=StateDictOptions(full_state_dict=full))


class ShardedOptimizers:
    """All optimizers of a sharded module, as one: their states go by the names of its parameters.

    Raises ConfigError as `check_steps` and `check_groups`.
    """

    def __init__(self, name: str, model: Module, optimizers: Sequence[Optimizer]) -> None:
        check_steps(optimizers)
        check_groups(model)
        self.name = name
        self._model, self._optimizers = model, tuple(optimizers)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All of them."""
        return self._optimizers

    @property
    def nbytes(self) -> int:
        """Bytes of their states on this rank."""
        states = (state for optimizer in self._optimizers for state in optimizer.state.values())
        return _bytes(value for state in states for value in state.values() if isinstance(value, torch.Tensor))

    def state_dict(self) -> ShardedState:
        """The states of all; one that has made no step has none."""
        with kept_from_stepping(self._optimizers):
            return ShardedState(get_optimizer_state_dict(self._model, self._optimizers))

    def target(self, metadata: Metadata) -> ShardedState:
        """States of the parameters that have one in the checkpoint: those never used in training have none.

        Raises ConfigError, before anything is changed, if the optimizers had another number of groups.
        """
        places = {name: path for name, path in (metadata.planner_data or {}).items() if path[0] == self.name}
        if groups := {path[2] for path in places.values() if path[1] == GROUPS}:
            self._check_count(len(groups))
        optimizers = self._optimizers
        with _all_learning(optimizers), _without_gradients(optimizers), _taking_closures(optimizers):
            for optimizer in self._optimizers:
                optimizer.state.clear()  # torch makes states for all parameters only where there is none
            state: dict[str, Any] = dict(get_optimizer_state_dict(self._model, self._optimizers))
        names = {name for group in state[GROUPS] for name in group[PARAMS]}
        saved = {name: path for name, path in places.items() if path[1] == STATE and path[2] in names}
        with_state = {path[2] for path in saved.values()}
        kept = {name: each for name, each in state[STATE].items() if name in with_state}
        self._make_room(kept, saved, metadata)
        # Options that the checkpoint lacks, such as those of a newer torch, stay as they are here.
        there = {path[2:4] for path in places.values() if path[1] == GROUPS and len(path) > 3}
        options = [
            {key: value for key, value in group.items() if not there or (i, key) in there or key == PARAMS}
            for i, group in enumerate(state[GROUPS])
        ]
        return ShardedState({STATE: kept, GROUPS: options})

    def _make_room(self, states: dict[str, Any], saved: Mapping[str, Any], metadata: Metadata) -> None:
        """Add to states the values that optimizers make after their first step only."""
        there, _ = flatten_state_dict({self.name: {STATE: states}})
        late = {name: path for name, path in saved.items() if name not in there}
        weights = get_model_state_dict(self._model) if late else {}
        for name, path in late.items():
            set_element(states, path[2:], empty(metadata.state_dict_metadata[name], weights.get(path[2])))

    def load_state_dict(self, state: Mapping[str, Any], *, full: bool = False) -> None:
        """Take over states, of shards unless they are ``full``; parameters that have none in it have none then.

        Raises ConfigError, before anything is changed, if the optimizers had other parameters.
        """
        with kept_from_stepping(self._optimizers):
            now: Any = get_optimizer_state_dict(self._model, self._optimizers)[GROUPS]
        of_each = list(zip(self._optimizers, self._parted(state[GROUPS]), self._parted(now), strict=True))
        for optimizer, groups, wanted in of_each:
            pairs = zip(_parameters(groups), _parameters(wanted), strict=True)
            if other := frozenset[str]().union(*(one ^ another for one, another in pairs)):
                names = ", ".join(sorted(other))
                self._refuse(f"other parameters in a group of its {type(optimizer).__name__}: see {names}")
        for optimizer, ours, _ in of_each:
            mine = frozenset[str]().union(*_parameters(ours))
            part: Any = {STATE: {name: each for name, each in state[STATE].items() if name in mine}, GROUPS: ours}
            has_any = any(isinstance(each, torch.Tensor) for each in tree_leaves(part[STATE]))  # else torch fails
            options = StateDictOptions(strict=False, full_state_dict=full and has_any)
            room = _given_no_more(optimizer, part[STATE].keys())
            with (
                _all_learning([optimizer]),
                room,
                options_kept(optimizer),
                _taking_closures([optimizer]),
                dtypes_kept(optimizer),
            ):
                set_optimizer_state_dict(self._model, optimizer, part, options=options)

    def _parted(self, groups: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
        """The groups of each optimizer."""
        self._check_count(len(groups))
        rest = iter(groups)
        return (list(islice(rest, len(optimizer.param_groups))) for optimizer in self._optimizers)

    def _check_count(self, saved: int) -> None:
        if saved != (count := sum(len(optimizer.param_groups) for optimizer in self._optimizers)):
            self._refuse(f"{saved} parameter groups, and has {count}")

    def _refuse(self, saved: str) -> NoReturn:
        raise ConfigError(
            f"{self.name} was saved with {saved}. Before it is loaded, make the optimizers as they were when it was "
            "saved: of the same parameters, in as many groups, in the same order. Parameters that training unfreezes "
            "later may be in a group from the start (docs/guides/changed_script.md)"
        )


@contextmanager
def as_before_on_error(parts: Iterable[object]) -> Iterator[None]:
    """Give optimizers their old state back if a load into them fails: room was made for it."""
    optimizers = [each for part in parts if isinstance(part, ShardedOptimizers) for each in part.optimizers]
    before = [dict(each.state) for each in optimizers]
    try:
        yield
    # Also KeyboardInterrupt: whoever catches it goes on with the optimizer as it was.
    except BaseException:
        for optimizer, state in zip(optimizers, before, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)
        raise


def check_steps(optimizers: Iterable[Optimizer]) -> None:
    """Raise ConfigError for one that torch cannot load: it makes a first step to create the state."""
    for each in optimizers:
        closure = signature(type(each).step).parameters.get("closure")
        if closure is not None and closure.default is Parameter.empty:
            raise ConfigError(
                f"{type(each).__name__} makes no step without a closure: torch.distributed.checkpoint cannot load its "
                "state. Save that by hand, as part of what differs on each rank"
            )


def check_groups(model: Module) -> None:
    """Raise ConfigError, in all ranks, for flat parameters of FSDP1 in several groups of ranks: torch fails in some."""
    if asks_rank_0(model):
        raise ConfigError(
            f"FSDP1 shards this {type(model).__name__} in a process group of some of the ranks, with "
            "use_orig_params=False: torch cannot save the state of its optimizers in groups without rank 0. Give "
            "FullyShardedDataParallel use_orig_params=True, or use fully_shard"
        )


def empty(kind: Any, like: Any = None) -> Any:
    """A place for DCP to load an entry into: sharded as a tensor ``like`` it, else whole; None for a Python value."""
    if not isinstance(kind, TensorStorageMetadata):
        return None
    if like is None or like.size() != kind.size:
        return torch.empty(kind.size, dtype=kind.properties.dtype)
    if isinstance(like, ShardedTensor):
        return copy.deepcopy(like)
    return torch.empty_like(like, dtype=kind.properties.dtype, requires_grad=False)


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters that it trains, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]


def _parameters(groups: Sequence[Mapping[str, Any]]) -> list[frozenset[str]]:
    return [frozenset(group[PARAMS]) for group in groups]


def _keeps_gradients_back(module: Module) -> bool:
    """Return whether FSDP2 is set not to reduce the gradients of this module after its backward."""
    return isinstance(module, FSDPModule) and not reduces_gradients(module)


@contextmanager
def kept_from_stepping(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Keep torch from making a first step, to have states to save, with optimizers that have none.

    It would count as one: of Adam, the next step would be the second. torch makes none where gradients are.
    """
    marked: list[torch.Tensor] = []
    for optimizer in optimizers:
        parameters = parameters_of(optimizer)
        if parameters and not optimizer.state and all(parameter.grad is None for parameter in parameters):
            # One gradient is enough: torch's _init_optim_state returns early if any parameter has one.
            parameters[0].grad = torch.zeros_like(parameters[0])
            marked.append(parameters[0])
    try:
        yield
    finally:
        for parameter in marked:
            parameter.grad = None


@contextmanager
def _without_gradients(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Let torch make a first step with zeros, for states to load into; gradients are put back."""
    kept = [(parameter, parameter.grad) for optimizer in optimizers for parameter in parameters_of(optimizer)]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextmanager
def _taking_closures(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Let torch make a first step, as ``step(closure=None)``, with optimizers of which that is ``step()``."""
    others = [each for each in optimizers if not _takes_closure(each)]
    before = [vars(each).get("step") for each in others]
    for each in others:
        each.step = partial(_step, each.step)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for each, step in zip(others, before, strict=True):
            if step is None:
                del each.step
            else:  # a scheduler's, which counts them
                each.step = step  # type: ignore[method-assign]


def _takes_closure(optimizer: Optimizer) -> bool:
    parameters = signature(type(optimizer).step).parameters.values()
    return any(each.name == "closure" or each.kind is Parameter.VAR_KEYWORD for each in parameters)


def _step(step: Callable[[], Any], closure: None = None) -> Any:
    return step()


@contextmanager
def _all_learning(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Let torch load the states of parameters that are frozen now, too, and may not be later."""
    parameters = (parameter for optimizer in optimizers for parameter in parameters_of(optimizer))
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    frozen = [parameter for parameter in frozen if parameter.is_floating_point() or parameter.is_complex()]
    for parameter in frozen:
        parameter.requires_grad = True
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad = False


@contextmanager
def _given_no_more(optimizer: Optimizer, names: Collection[str]) -> Iterator[None]:
    """Keep from an optimizer the states that torch adds to full ones, for parameters of other names."""

    def leave_out(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        kept = {name: each for name, each in state[STATE].items() if not isinstance(name, str) or name in names}
        return state | {STATE: kept}

    hook = optimizer.register_load_state_dict_pre_hook(leave_out)
    try:
        yield
    finally:
        hook.remove()


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of this rank's shards."""
    return sum(local_part(each).nbytes for each in tensors)
