"""State dicts for DCP, and back: of a model, its optimizers, and states that are saved with them."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn import Module
from torch.optim import Optimizer

from fastckpt._core.arguments import abbreviated, instance, mapping
from fastckpt._core.client.optimizers import unwrapped
from fastckpt._core.error_codes import coded
from fastckpt._core.format.number_lists import pickled_numbers
from fastckpt._core.torch_private.sharding import set_element
from fastckpt.dcp.cached_names import named_state
from fastckpt.dcp.sharded_state import (
    ShardedModel,
    ShardedOptimizers,
    ShardedPart,
    check_groups,
    check_steps,
    empty,
    kept_from_stepping,
)
from fastckpt.errors import ConfigError

MODEL, OPTIMIZER = "model", "optimizer"
"""Keys of the state of a model, and of that of its optimizers, in a checkpoint."""
Optimizers = Optimizer | Iterable[Optimizer]


def state_of(given: Mapping[str, Any], options: StateDictOptions | None = None) -> dict[str, Any]:
    """The state to save, of the arguments of `save_checkpoint`; raises ConfigError unless it is given in one way."""
    state_dict, model, extra = given.get("state_dict"), given.get("model"), given.get("extra_sd", {})
    mapping("extra_sd", extra, "a dict of what is saved with the model, such as {'epoch': 3}")
    if (state_dict is None) == (model is None) or (model is None and given.keys() & {OPTIMIZER, "extra_sd"}):
        raise ConfigError("what is saved? Give a state_dict; or a model, with its optimizer and extra_sd, if any")
    if taken := extra.keys() & {MODEL, OPTIMIZER}:
        raise ConfigError(f"extra_sd has {min(taken)!r}, which is the name of what is given with it: rename it")
    if model is not None:
        instance("model", model, Module, "a torch.nn.Module", "give the module that is trained")
        return sharded_state(model, optimizers_of(given.get("optimizer")), options) | dict(extra)
    assert state_dict is not None
    return {name: each.state_dict() if isinstance(each, Stateful) else each for name, each in state_dict.items()}


def apart(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``extra_sd`` that DCP would not give back unchanged.

    It makes texts of all keys, and a leaf of each number, so dicts of many numbers are among them.
    """
    return {name: value for name, value in extra.items() if _is_apart(value)}


def _is_apart(node: Any) -> bool:
    if pickled_numbers(node) is not None:
        return isinstance(node, Mapping)
    if isinstance(node, Mapping):
        return any(type(key) is not str for key in node) or any(map(_is_apart, node.values()))
    return isinstance(node, list | tuple) and any(map(_is_apart, node))


def sharded_state(
    model: Module, optimizers: tuple[Optimizer, ...], options: StateDictOptions | None = None
) -> dict[str, Any]:
    """The state of a model and its optimizers, by torch's names for parameters, whatever wraps the model."""
    if not optimizers:
        return {MODEL: get_model_state_dict(model, options=options)}
    check_steps(optimizers)
    check_groups(model)
    with kept_from_stepping(optimizers):
        states = get_state_dict(model, optimizers, options=options) if options else named_state(model, optimizers)
    return dict(zip((MODEL, OPTIMIZER), states, strict=True))


def sharded_parts(model: Module, optimizers: tuple[Optimizer, ...]) -> list[ShardedPart]:
    """Parts with a `sharded_state` to load into."""
    instance("model", model, Module, "a torch.nn.Module", "give the module that is trained")
    return [ShardedModel(MODEL, model), *([ShardedOptimizers(OPTIMIZER, model, optimizers)] if optimizers else [])]


def optimizers_of(given: Optimizers | None) -> tuple[Optimizer, ...]:
    """The optimizers that a user gives, one or several; raises ArgumentError for other objects."""
    found: tuple[Any, ...] = () if given is None else (given,)
    if isinstance(given, Iterable) and not isinstance(given, str | Mapping | Optimizer):
        found = tuple(given)
    for each in found:
        instance("optimizer", each, Optimizer, "a torch optimizer, or several", "give what is stepped, or leave it out")
    return tuple(map(unwrapped, found))


class WholeLoadPlanner(DefaultLoadPlanner):
    """Plans loads of entries that the checkpoint has by exactly these names.

    torch's takes a checkpoint with more entries than a rank's state for one of torch 2.3, with other names. A rank
    without a shard of some tensor of FSDP1 has such a state.
    """

    def create_local_plan(self) -> LoadPlan:
        """Plan the reads of this rank; raises ConfigError for entries that are missing, or of another shape."""
        assert self.metadata is not None
        there = self.metadata.state_dict_metadata
        missing = sorted(self.state_dict.keys() - there.keys())
        try:
            if missing:
                return super().create_local_plan()
            return create_default_local_load_plan(self.state_dict, self.metadata)
        except (RuntimeError, ValueError) as error:
            more = sorted(name for name in there if name.partition(".")[0] == MODEL and name not in self.state_dict)
            why = f"it has no {abbreviated(missing)}" if missing else str(error)
            why += f"; it has {abbreviated(more)}, which the model has not" if more else ""
            raise ConfigError(
                coded(
                    f"the checkpoint does not fit: {why}. Give the model and optimizers that were saved, or, to "
                    "start afresh, another checkpoint directory",
                    "FC-043",
                )
            ) from error


class Extra:
    """The entries of a checkpoint that are not of these states.

    Attributes:
        leaves: The targets of DCP's load, by the names of the leaves: tensors, and None for Python values.
    """

    def __init__(self, metadata: Metadata, names: Collection[str]) -> None:
        kinds = metadata.state_dict_metadata
        where = metadata.planner_data or {name: (name,) for name in kinds}
        self._places = {name: where[name] for name in kinds if where[name][0] not in names}
        self.leaves = {name: empty(kinds[name]) for name in self._places}

    def of(self, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state, in the containers in which it was saved, from the leaves that were loaded."""
        extra: dict[str, Any] = {}
        for name, place in self._places.items():
            set_element(extra, place, loaded[name])
        return extra
