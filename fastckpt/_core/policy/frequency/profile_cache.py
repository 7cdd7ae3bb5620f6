"""The profile of a job in its checkpoints: as JSON once it is complete, before as numbers.

A save can change numbers without pickling its state again. A profile that cannot be used is ignored, with the reason.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from operator import index
from typing import Any

from fastckpt._core.policy.frequency.intervals import Intervals
from fastckpt._core.policy.frequency.profiling import COUNTS, Profile
from fastckpt.errors import ConfigError

_MEASURED = tuple(each.name for each in fields(Profile) if each.name not in COUNTS)


@dataclass(frozen=True)
class ProfileKey:
    """Circumstances that a profile depends on.

    Attributes:
        size: Bytes of the state.
        world_size: Ranks of the job.
        storage: The kind of storage, such as "ext4" or "s3".
        device: The device on which training runs, such as "cpu" or "NVIDIA H200".
        versions: Versions of the software that takes part, by name.
        optimizers: Their classes, which stand for the states that they will have.
    """

    size: int
    world_size: int
    storage: str
    device: str
    versions: Mapping[str, str] = field(default_factory=dict)
    optimizers: str = ""


@dataclass(frozen=True)
class Remembered:
    """Results of an earlier run.

    Attributes:
        profile: Its measurements.
        intervals: The last intervals that tuning chose; None if it did not get there.
    """

    profile: Profile
    intervals: Intervals | None = None


@dataclass(frozen=True)
class Ignored:
    """The reason why a profile is of no use."""

    reason: str


def to_json(remembered: Remembered, circumstances: ProfileKey, overhead: float) -> str:
    """Return JSON, for the same circumstances."""
    intervals = [remembered.intervals.memory, remembered.intervals.storage] if remembered.intervals else None
    profile = asdict(remembered.profile)
    return json.dumps(
        {"circumstances": _plain(circumstances), "overhead": overhead, "profile": profile, "intervals": intervals}
    )


def from_json(text: str, circumstances: ProfileKey, overhead: float) -> Remembered | Ignored:
    """Read the result of `to_json`, if it is of these circumstances; for another overhead without the intervals."""
    try:
        content = json.loads(text)
        found, wanted = content["circumstances"], _plain(circumstances)
        if found != wanted:
            others = [name for name in wanted if found.get(name) != wanted[name]]
            return Ignored(f"it is of other circumstances: {', '.join(others) or 'it names more'}")
        profile = Profile(**content["profile"])
        tuned = content["intervals"] if content["overhead"] == overhead else None
        return Remembered(profile, Intervals(*map(index, tuned)) if tuned else None)
    # Whatever the checkpoint holds: a profile that cannot be read costs a new profile, never the resume.
    except (ConfigError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        return Ignored(f"it cannot be used: {str(error)[:200]}")


def to_numbers(profile: Profile | None, circumstances: ProfileKey | None) -> dict[str, float]:
    """A profile that goes on in the next run, as numbers alone: always equally many, of the same types."""
    if profile is None or circumstances is None:
        # The same keys and types as with a profile: a state of equal shape needs no pickling at the next save.
        return dict.fromkeys(("circumstances", *COUNTS), 0) | dict.fromkeys(_MEASURED, 0.0)
    counts = {name: int(getattr(profile, name)) for name in COUNTS}
    measured = {name: float(getattr(profile, name)) for name in _MEASURED}
    return {"circumstances": _number(circumstances), **counts, **measured}


def from_numbers(numbers: Any, circumstances: ProfileKey) -> Profile | None:
    """Read the result of `to_numbers`, if it is of these circumstances and was measured; else None."""
    if not isinstance(numbers, Mapping) or numbers.get("circumstances") != _number(circumstances):
        return None
    try:
        measured: dict[str, Any] = {name: float(numbers[name]) for name in _MEASURED}
        return Profile(**measured, **{name: index(numbers[name]) for name in COUNTS})
    except (ConfigError, KeyError, TypeError, ValueError):
        return None


def _number(circumstances: ProfileKey) -> int:
    plain = json.dumps(_plain(circumstances), sort_keys=True)
    # 48 bits, so that the number is exact as an int of eight bytes and as a float.
    return int(hashlib.sha256(plain.encode()).hexdigest()[:12], 16)


def _plain(circumstances: ProfileKey) -> dict[str, Any]:
    return {**vars(circumstances), "versions": dict(circumstances.versions)}
