"""What the state of a training consists of: objects with a state, by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastckpt.data import DataState, data_state, load_data_state
from fastckpt.data.contract import check_stateful
from fastckpt.errors import ConfigError
from fastckpt.stateful import Stateful

Part = Stateful | Sequence[Stateful]


class Parts:
    """Gathers the states of all parts, and gives them back.

    Args:
        parts: One object or several under each name; empty ones are left out.
        data: What says where the data are; None for nothing.
    """

    def __init__(self, parts: Mapping[str, Part], data: Any = None) -> None:
        self._parts = {name: part for name, part in parts.items() if not isinstance(part, Sequence) or len(part)}
        self._data = data
        for name, part in self._parts.items():
            for each in part if isinstance(part, Sequence) else (part,):
                if not isinstance(each, Stateful):
                    raise ConfigError(
                        f"{name} is a {type(each).__name__}, which has no state_dict and load_state_dict; give what "
                        "has both"
                    )
        if data is not None:
            check_stateful(data)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What all ranks have in common, and what this one has beside it."""
        common: dict[str, Any] = {name: _state(part) for name, part in self._parts.items()}
        if self._data is None:
            return common, {}
        data: DataState = data_state(self._data)
        return common | {"data": data.common}, {"data": data.own} if data.own else {}

    def load(self, common: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Take back what `state` gave; raises ConfigError, before anything is changed, if a part is missing there."""
        wanted = [*self._parts, *(["data"] if self._data is not None else [])]
        if missing := [name for name in wanted if name not in common]:
            raise ConfigError(
                f"the checkpoint has no {' and no '.join(missing)}; it has {', '.join(common)}. Give the parts that "
                "were saved, or load it with DdpCheckpointer"
            )
        for name, part in self._parts.items():
            _load(name, part, common[name])
        if self._data is not None:
            load_data_state(self._data, common["data"], own.get("data"))


def _state(part: Part) -> Any:
    return [each.state_dict() for each in part] if isinstance(part, Sequence) else part.state_dict()


def _load(name: str, part: Part, state: Any) -> None:
    several, saved = isinstance(part, Sequence), len(state) if isinstance(state, list) else None
    if saved != (len(part) if several else None):  # type: ignore[arg-type]
        raise ConfigError(f"{name} was saved as {'one' if saved is None else f'a list of {saved}'}; give the same here")
    pairs = zip(part, state, strict=True) if isinstance(part, Sequence) else [(part, state)]
    for each, own in pairs:
        each.load_state_dict(own)
