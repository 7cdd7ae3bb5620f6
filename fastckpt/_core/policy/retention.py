"""Retention policies: functions of the manifests on storage, so that no process has to remember.

Each policy keeps the newest checkpoint, and its choice does not depend on when it is made. After any deletion of
checkpoints that it did not keep, it decides on the rest as if all were still there.
"""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

from fastckpt._core.arguments import shown
from fastckpt.errors import ConfigError, ProtocolError

Id: TypeAlias = tuple[int, int]
"""(history, step): the larger is the newer."""

SHORTEST = 0.01
"""The shortest period in minutes."""
DEEPEST = 8
"""Maximum depth of nested unions in JSON."""


class RetentionEntry(NamedTuple):
    """Facts that a policy knows of a checkpoint.

    Attributes:
        id: History and step.
        time: Seconds since the epoch at which it was persisted, by the clock of then: not always later for newer ones.
        metrics: Metrics that its user gave.
        past: First and last of each run of histories that its training came through; see `lineage`.
        passed_over: Newer checkpoints that its history, or one that this went on from, did not load; see `lineage`.
    """

    id: Id
    time: float = 0.0
    metrics: Mapping[str, float] = {}
    past: tuple[tuple[int, int], ...] = ()
    passed_over: frozenset[Id] = frozenset()


@dataclass(frozen=True)
class KeepAll:
    """Keeps every checkpoint."""

    def __call__(self, entries: Iterable[RetentionEntry]) -> frozenset[Id]:
        """The ids of those to keep."""
        return frozenset(entry.id for entry in entries)


@dataclass(frozen=True)
class KeepLast:
    """Keeps the newest n; n is at least 1."""

    n: int

    def __post_init__(self) -> None:
        _demand_count("the number of checkpoints to keep", self.n)

    def __call__(self, entries: Iterable[RetentionEntry]) -> frozenset[Id]:
        """The ids of those to keep."""
        return frozenset(sorted({entry.id for entry in entries})[-self.n :])


@dataclass(frozen=True)
class KeepEvery:
    """Keeps those whose step is a multiple of k, and the newest; k is at least 1."""

    k: int

    def __post_init__(self) -> None:
        _demand_count("the interval of steps to keep", self.k)

    def __call__(self, entries: Iterable[RetentionEntry]) -> frozenset[Id]:
        """The ids of those to keep."""
        ids = {entry.id for entry in entries}
        return frozenset(id for id in ids if id[1] % self.k == 0) | _newest(ids)


@dataclass(frozen=True)
class KeepEveryMinutes:
    """Keeps the first checkpoint of each period of so many minutes, and the newest.

    Periods are those of the clock (of 60 minutes: each hour), so they do not drift, however far apart saves are. A
    checkpoint is kept if its period is another than that of the last one kept before it. So a clock that is set back
    begins new periods as well as one that is set forward, and kept checkpoints are never more than two periods apart.
    """

    minutes: float

    def __post_init__(self) -> None:
        if not (_is_finite(self.minutes) and self.minutes >= SHORTEST):
            raise ConfigError(
                f"the period to keep a checkpoint of is {self.minutes!r}; give minutes, {SHORTEST} or more"
            )

    def __call__(self, entries: Iterable[RetentionEntry]) -> frozenset[Id]:
        """The ids of those to keep."""
        kept: list[Id] = []
        last = math.nan
        ordered = sorted(entries, key=lambda entry: entry.id)
        for entry in ordered:
            period = entry.time // (60 * self.minutes)
            # Compared with the period of the last kept one, not with
            # a time: the rule gives the same result after deletions.
            if period != last:
                last = period
                kept.append(entry.id)
        return frozenset(kept) | _newest(entry.id for entry in ordered)


@dataclass(frozen=True)
class KeepBest:
    """Keeps the n best by a metric, and the newest; of equals the newer is the better.

    One without that metric, or with one that is no finite number, is not among the best.
    """

    n: int
    metric: str
    mode: str = "min"

    def __post_init__(self) -> None:
        _demand_count("the number of best checkpoints to keep", self.n)
        _demand_name("the metric to keep the best by", self.metric)
        if self.mode not in ("min", "max"):
            raise ConfigError(f"the mode is {self.mode!r}; give 'min' if a small {self.metric} is good, else 'max'")

    def __call__(self, entries: Iterable[RetentionEntry]) -> frozenset[Id]:
        """The ids of those to keep."""
        entries = list(entries)
        sign = 1 if self.mode == "max" else -1
        measured = {(sign * entry.metrics[self.metric], entry.id) for entry in entries if self._measured(entry)}
        return frozenset(id for _, id in sorted(measured)[-self.n :]) | _newest(entry.id for entry in entries)

    def _measured(self, entry: RetentionEntry) -> bool:
        return _is_finite(entry.metrics.get(self.metric))


@dataclass(frozen=True)
class KeepMeasured:
    """Keeps the checkpoints that have a metric, such as the epoch that ends there, and the newest."""

    metric: str

    def __post_init__(self) -> None:
        _demand_name("the metric to keep what has it", self.metric)

    def __call__(self, entries: Iterable[RetentionEntry]) -> frozenset[Id]:
        """The ids of those to keep."""
        entries = list(entries)
        measured = (entry.id for entry in entries if _is_finite(entry.metrics.get(self.metric)))
        return frozenset(measured) | _newest(entry.id for entry in entries)


@dataclass(frozen=True)
class KeepNamed:
    """Keeps n: the newest, the one whose step the newest has as that metric, and of the others the newest.

    If the newest names another, two are kept, even if n is 1. A step that is named later must be newer, or the same.
    """

    n: int
    metric: str

    def __post_init__(self) -> None:
        _demand_count("the number of checkpoints to keep", self.n)
        _demand_name("the metric that names a step to keep", self.metric)

    def __call__(self, entries: Iterable[RetentionEntry]) -> frozenset[Id]:
        """The ids of those to keep."""
        ordered = sorted(entries, key=lambda entry: entry.id)
        if not ordered:
            return frozenset()
        step = ordered[-1].metrics.get(self.metric)
        named = [entry.id for entry in ordered if entry.id[1] == step][-1:]
        kept = frozenset(named) | _newest(entry.id for entry in ordered)
        others = [entry.id for entry in ordered if entry.id not in kept]
        # The slice counts from the front, because [-0:] would keep all instead of none.
        return kept | frozenset(others[max(0, len(others) - max(0, self.n - len(kept))) :])


@dataclass(frozen=True)
class KeepAny:
    """Keeps the checkpoints that at least one of some policies keeps."""

    policies: tuple["Policy", ...]

    def __post_init__(self) -> None:
        if not self.policies:
            raise ConfigError("a union of no policies would keep nothing; give at least one")

    def __call__(self, entries: Iterable[RetentionEntry]) -> frozenset[Id]:
        """The ids of those to keep."""
        entries = list(entries)
        return frozenset(id for policy in self.policies for id in policy(entries))


Policy: TypeAlias = KeepAll | KeepLast | KeepEvery | KeepEveryMinutes | KeepBest | KeepMeasured | KeepNamed | KeepAny


def measured(metrics: object) -> dict[str, float]:
    """The metrics that can be compared among those of a manifest, which may hold anything."""
    found = metrics if isinstance(metrics, Mapping) else {}
    return {name: float(value) for name, value in found.items() if _is_finite(value)}


def checked(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of a user, as floats; NaN or infinite ones, as of a loss that overflowed, count as not measured.

    Raises ConfigError with name and value for values that are no number.
    """
    found = {}
    for name, value in metrics.items():
        try:
            # float() accepts numpy scalars and tensors of one element, and also strings, which are a mistake here.
            number = None if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # such as of a tensor with several elements
            number = None
        if not isinstance(name, str) or number is None:
            raise ConfigError(f"the metric {name!r} is {shown(value)}; give a number, under a name")
        if math.isfinite(number):
            found[name] = number
    return found


_NAMES: dict[str, type[Policy]] = {
    "all": KeepAll,
    "last": KeepLast,
    "every": KeepEvery,
    "minutes": KeepEveryMinutes,
    "best": KeepBest,
    "measured": KeepMeasured,
    "named": KeepNamed,
}


def to_json(policy: Policy) -> dict[str, Any]:
    """A policy as a JSON object, such as ``{"keep": "last", "n": 3}``."""
    if isinstance(policy, KeepAny):
        return {"keep": "any", "of": [to_json(part) for part in policy.policies]}
    (name,) = (name for name, kind in _NAMES.items() if isinstance(policy, kind))
    return {"keep": name, **vars(policy)}


def from_json(value: object, depth: int = DEEPEST) -> Policy:
    """Read a result of `to_json`; raises ProtocolError with the value for anything else, or for deeper unions."""
    # The text comes from a message: without a limit, a deep one would end in a RecursionError.
    if depth < 0:
        raise ProtocolError(f"a retention policy is nested deeper than {DEEPEST} unions")
    given = dict(value) if isinstance(value, Mapping) else {}
    keep = given.pop("keep", None)
    try:
        if keep == "any" and given.keys() == {"of"} and isinstance(given["of"], list):
            return KeepAny(tuple(from_json(part, depth - 1) for part in given["of"]))
        if isinstance(keep, str) and keep in _NAMES and given.keys() == {field.name for field in fields(_NAMES[keep])}:
            return _NAMES[keep](**given)
    except ConfigError as error:
        raise ProtocolError(f"a retention policy cannot be: {error}") from error
    raise ProtocolError(f"a retention policy is {str(value)[:200]!r}; known are any, {', '.join(_NAMES)}")


def _newest(ids: Iterable[Id]) -> frozenset[Id]:
    return frozenset(sorted(ids)[-1:])


def _is_finite(value: Any) -> bool:
    # The exact types: bool is an int, and a manifest may hold any JSON. Comparing also excludes NaN and infinity, and
    # integers that are too large for a float.
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _demand_count(what: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{what} is {value!r}; give a whole number, 1 or more")


def _demand_name(what: str, value: object) -> None:
    if not (isinstance(value, str) and value):
        raise ConfigError(f"{what} is {value!r}; give its name")
