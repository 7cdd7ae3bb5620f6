"""Which checkpoints to keep."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from fastckpt.errors import ConfigError, ProtocolError

Id = TypeVar("Id", bound=tuple[int, int])
"""(history, step): the larger is the newer."""


@dataclass(frozen=True)
class KeepAll:
    """Keeps every checkpoint."""

    def __call__(self, ids: Collection[Id]) -> frozenset[Id]:
        """Those of ``ids`` to keep."""
        return frozenset(ids)


@dataclass(frozen=True)
class KeepLast:
    """Keeps the newest n; n is at least 1."""

    n: int

    def __post_init__(self) -> None:
        _demand_positive("the number of checkpoints to keep", self.n)

    def __call__(self, ids: Collection[Id]) -> frozenset[Id]:
        """Those of ``ids`` to keep."""
        return frozenset(sorted(set(ids))[-self.n :])


@dataclass(frozen=True)
class KeepEvery:
    """Keeps those whose step is a multiple of k, and the newest; k is at least 1."""

    k: int

    def __post_init__(self) -> None:
        _demand_positive("the interval of steps to keep", self.k)

    def __call__(self, ids: Collection[Id]) -> frozenset[Id]:
        """Those of ``ids`` to keep."""
        return frozenset(i for i in ids if i[1] % self.k == 0) | frozenset(sorted(ids)[-1:])


Policy: TypeAlias = KeepAll | KeepLast | KeepEvery


def to_json(policy: Policy) -> dict[str, str | int]:
    """A policy as a JSON object, such as ``{"keep": "last", "n": 3}``."""
    match policy:
        case KeepLast(n):
            return {"keep": "last", "n": n}
        case KeepEvery(k):
            return {"keep": "every", "k": k}
        case KeepAll():
            return {"keep": "all"}


def from_json(value: object) -> Policy:
    """Read what `to_json` gave; raises ProtocolError with the value for anything else."""
    fields = value if isinstance(value, Mapping) else {}
    try:
        match dict(fields):
            case {"keep": "last", "n": n, **rest} if not rest:
                return KeepLast(n)
            case {"keep": "every", "k": k, **rest} if not rest:
                return KeepEvery(k)
            case {"keep": "all", **rest} if not rest:
                return KeepAll()
    except ConfigError as error:
        raise ProtocolError(f"a retention policy cannot be: {error}") from error
    raise ProtocolError(f"a retention policy is {str(value)[:200]!r}; known are last, every and all")


def _demand_positive(what: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{what} is {value!r}; give a whole number, 1 or more")
