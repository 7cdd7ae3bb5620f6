"""The state of a training run: objects with a state, by name."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from fastckpt._core.arguments import shown
from fastckpt._core.client.optimizers import Kinds, check_kinds, dtypes_kept, options_kept
from fastckpt._core.client.optimizers import unwrapped as stepping
from fastckpt._core.data.protocol import DataState, check_stateful, data_state, load_data_state
from fastckpt._core.data.split import rank_and_world
from fastckpt._core.error_codes import coded
from fastckpt._core.stateful import Stateful
from fastckpt.checkpointer.gradients import Gradients
from fastckpt.checkpointer.parameter_names import ParameterNames
from fastckpt.errors import ConfigError, FastckptError

logger = logging.getLogger("fastckpt")

PARTS = ("optimizer", "scheduler", "data")
"""Arguments of `Checkpointer` that are parts, besides the model."""
Part = Stateful | Sequence[Stateful]
OWN = "fastckpt"
"""Key, in a checkpoint, of the state of the training run itself."""
OPTIMIZERS = "optimizers"
"""Key, in that, of the classes of its optimizers; earlier versions did not save them."""
PARAMETERS = "parameters"
"""Key, in that, of the names of their parameters; earlier versions did not save them either."""

LOADERS, POSITIONS, WORLD = "loaders", "positions", "world"
"""Keys, in a rank's own state, of its positions in further loaders."""


class TrainingState:
    """Gathers the states of all parts, and gives them back.

    Args:
        parts: One object or several under each name; empty ones are left out.
        data: The object that has the position in the data; None for none.
        gradients: Those of this rank.
        optimizers: Of which classes the optimizers are.

    Attributes:
        parameters: Names those of optimizers without names in their states.
    """

    def __init__(
        self, parts: Mapping[str, Part], data: Any, gradients: Gradients, optimizers: Kinds | None = None
    ) -> None:
        self._parts = {name: part for name, part in parts.items() if not isinstance(part, Sequence) or len(part)}
        # Further loaders: ranks may be at different positions in them.
        self._loaders = {name: part for name, part in self._parts.items() if _hands_out(part)}
        self._data, self._gradients, self.optimizers = data, gradients, optimizers or {}
        self.parameters = ParameterNames(self._parts)
        for name, part in self._parts.items():
            for each in part if isinstance(part, Sequence) else (part,):
                if isinstance(each, type) or not isinstance(each, Stateful):
                    made = f", such as {each.__name__}(...)" if isinstance(each, type) else ", or leave it out"
                    raise ConfigError(f"{name} is {shown(each)}; give what has state_dict and load_state_dict{made}")
            if isinstance(part, Sequence) and any(map(_has_own_place, part)):
                raise ConfigError(
                    f"{name} is a list of loaders, of which each rank has a place of its own: give each loader a name, "
                    f"such as others={{'{name}_0': ..., '{name}_1': ...}}"
                )
        for loader in self._loaders.values():
            check_stateful(loader)
        if data is not None:
            check_stateful(data)

    def state(self, position: DataState | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """State common to all ranks, and this rank's own; with this data position, or the present one."""
        common = self.common()  # first: FSDP2 then has its shards again, which have the gradients
        loaders = {name: data_state(part) for name, part in self._loaders.items()}
        common |= {name: state.common for name, state in loaders.items()}
        gradients = self._gradients.state()
        own = {"gradients": gradients} if gradients else {}
        if any(state.own for state in loaders.values()):
            own[LOADERS] = {name: state.own for name, state in loaders.items()}
        if positions := {name: loaders[name].common for name, part in self._loaders.items() if _is_ours(part)}:
            own[POSITIONS] = {WORLD: rank_and_world(None, None)[1], **positions}
        if self._data is None:
            return common, own
        data = position or data_state(self._data)
        return common | {"data": data.common}, own | ({"data": data.own} if data.own else {})

    def common(self) -> dict[str, Any]:
        """State common to all ranks, but for the data, some of which begin to be read when asked for a state."""
        return {name: _state(part) for name, part in self._parts.items() if name not in self._loaders}

    @property
    def model(self) -> Any:
        """The model as it was given."""
        return self._parts["model"]

    @property
    def sole_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, if there is one of torch's alone."""
        part = self._parts.get("optimizer", ())
        given = part if isinstance(part, Sequence) else (part,)
        found = [stepping(each) for each in given if isinstance(each, torch.optim.Optimizer)]
        return found[0] if len(found) == 1 else None

    def blank(self, name: str) -> Any:
        """A placeholder for the state of a part of this name before it is loaded."""
        part = self._parts.get(name)
        return [None] * len(part) if isinstance(part, Sequence) else None

    @property
    def _names(self) -> list[str]:
        """The name of each object, as `check` gives them."""
        return [name for name, part in self._parts.items() for _ in (part if isinstance(part, Sequence) else (part,))]

    @property
    def shared(self) -> dict[str, str]:
        """Properties of the data that must agree on all ranks: unlike orders or batch sizes would lose samples."""
        if not hasattr(self._data, "rank_state_dict"):
            return {}
        said = self._data.state_dict() | {"batch_size": getattr(self._data, "batch_size", None)}
        return {f"{name} of the data": str(value) for name, value in said.items()}

    def warn_of_left_out(self, common: Mapping[str, Any]) -> None:
        """Log the names that a checkpoint has and `load` does not take."""
        if names := sorted(common.keys() - self._parts.keys() - {OWN, *(["data"] if self._data is not None else [])}):
            logger.warning(
                "the checkpoint has %s, which no part takes: it is not loaded. To load it, give %s",
                ", ".join(names),
                ", ".join(f"{name}=" if name in PARTS else f"others={{{name!r}: ...}}" for name in names),
            )

    def check(self, common: Mapping[str, Any]) -> list[tuple[Stateful, Any]]:
        """Each object with its state in a checkpoint; raises ConfigError if parts do not fit."""
        wanted = [*self._parts, *(["data"] if self._data is not None else [])]
        there = [name for name in common if name != OWN]
        if missing := [name for name in wanted if name not in common]:
            raise ConfigError(
                coded(
                    f"the checkpoint has no {' and no '.join(missing)}; it has {', '.join(there)}. Give the parts that "
                    "were saved, or load it with the checkpointer that saved it, such as DdpCheckpointer",
                    "FC-043",
                )
            )
        pairs = [pair for name, part in self._parts.items() for pair in _pairs(name, part, common[name])]
        own = common[OWN] if isinstance(common.get(OWN), Mapping) else {}
        check_kinds(own.get(OPTIMIZERS), self.optimizers)
        self.parameters.check(own.get(PARAMETERS))
        return pairs

    def load(self, common: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Take back a result of `state`; raises ConfigError, before anything is changed, if parts do not fit."""
        for (part, state), name in zip(self.check(common), self._names, strict=True):
            _take_seed(part, state)
            if name in self._loaders and ("foreign" in state or _is_ours(part)):
                positions = own.get(POSITIONS, {})
                is_alike = positions.get(WORLD) == rank_and_world(None, None)[1]
                position = positions.get(name, state) if is_alike else state
                load_data_state(part, position, own.get(LOADERS, {}).get(name))
            elif isinstance(part, torch.optim.Optimizer):
                inner = stepping(part)  # of accelerate's, which torch cannot hook into
                with options_kept(inner), dtypes_kept(inner) if self._has_dtypes_of(common) else nullcontext():
                    _load(name, part, state)
            else:
                _load(name, part, state)
        self._gradients.load(own.get("gradients"))
        if self._data is not None:
            _take_seed(self._data, common["data"])
            load_data_state(self._data, common["data"], own.get("data"))

    def _has_dtypes_of(self, common: Mapping[str, Any]) -> bool:
        """Return whether the model has the dtypes that were saved; states of other dtypes are cast, as in torch."""
        states = common.get("model"), _state(self._parts.get("model", ()))
        saved, now = ([each.dtype for each in _tensors(state)] for state in states)
        return saved == now


def _take_seed(part: Any, state: Any) -> None:
    """Set a loader's seed to the saved one: its load then warns of no other, as the report of the resume does."""
    if hasattr(part, "set_seed") and isinstance(state, Mapping) and isinstance(state.get("seed"), int):
        part.set_seed(state["seed"])


def _is_ours(loader: Any) -> bool:
    """Return whether a loader's position is common to all ranks: further loaders may be a step apart."""
    return hasattr(loader, "rank_state_dict")


def further(others: Any, taken: Collection[str]) -> dict[str, Part]:
    """Parts that a user has named; raises ConfigError for names that are taken."""
    if not isinstance(others, Mapping):
        raise ConfigError(f"others is a {type(others).__name__}; give parts by name, such as {{'scaler': scaler}}")
    if double := sorted(name for name in others if name in taken):
        raise ConfigError(f"others has {double[0]!r}, which has its own place in a checkpoint; choose another name")
    return dict(others)


def _hands_out(part: Part) -> bool:
    return hasattr(part, "rank_state_dict") or (hasattr(part, "dataset") and hasattr(part, "__iter__"))


def _has_own_place(part: Any) -> bool:
    """Return whether a data source has, or may have, another position on each rank."""
    if not _hands_out(part):
        return False
    return rank_and_world(None, None)[1] > 1 or (_is_ours(part) and bool(part.rank_state_dict()))


def _tensors(node: Any) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    children = node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple) else ()
    for child in children:
        yield from _tensors(child)


def _state(part: Part) -> Any:
    return [each.state_dict() for each in part] if isinstance(part, Sequence) else part.state_dict()


def _load(name: str, part: Stateful, state: Any) -> None:
    """Have an object take its state; raises ConfigError if it is one of another."""
    try:
        part.load_state_dict(state)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, FastckptError | torch.OutOfMemoryError):
            raise
        raise ConfigError(
            coded(
                f"{name}, a {type(part).__name__}, does not take its state in the checkpoint: {error}; give the {name} "
                "that was saved, or, to start afresh, another checkpoint directory",
                "FC-043",
            )
        ) from error


def _pairs(name: str, part: Part, state: Any) -> list[tuple[Stateful, Any]]:
    """Each object with its state."""
    several, saved = isinstance(part, Sequence), len(state) if isinstance(state, list) else None
    if saved != (len(part) if several else None):  # type: ignore[arg-type]
        raise ConfigError(f"{name} was saved as {'one' if saved is None else f'a list of {saved}'}; give the same here")
    return list(zip(part, state, strict=True)) if isinstance(part, Sequence) else [(part, state)]
