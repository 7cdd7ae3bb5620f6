"""The profile of a job as JSON, so that a resumed job need not profile: what is amiss with it is told, and not used.

One that is not complete is kept as numbers, which a save can change without pickling its state again.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isnan, nan
from operator import index
from typing import Any

from fastckpt._core.policy.frequency.intervals import Choice, Intervals, Profile, choose
from fastckpt._core.policy.frequency.profiling import ProfilingProgress
from fastckpt.errors import ConfigError

FORMAT = 1
LARGEST = 2**16
"""Characters that a cache has at most."""

_COUNTS = ("iterations", "snapshots", "persists", "plain")
_SIZES = ("size", "peak", "capacity")
_MEASURED = tuple(each.name for each in fields(Profile) if each.name not in _SIZES)


@dataclass(frozen=True)
class ProfileKey:
    """What a profile depends on.

    Attributes:
        size: Bytes of the state.
        world_size: Ranks of the job.
        storage: The kind of storage, such as "ext4" or "s3".
        device: The device on which training runs, such as "cpu" or "NVIDIA H200".
        versions: Of what takes part, by name.
        optimizers: Their kinds: the states that they will have are not there yet.
    """

    size: int
    world_size: int
    storage: str
    device: str
    versions: Mapping[str, str] = field(default_factory=dict)
    optimizers: str = ""


@dataclass(frozen=True)
class Remembered:
    """What an earlier run found out.

    Attributes:
        profile: What it measured.
        choice: What Algorithm 1 makes of it.
        intervals: Those to which it was tuned at last; None if it was not.
    """

    profile: Profile
    choice: Choice
    intervals: Intervals | None = None


@dataclass(frozen=True)
class Ignored:
    """A cache that is of no use, and why."""

    reason: str


def key(circumstances: ProfileKey) -> str:
    """A name for these circumstances that a file can bear: 16 hexadecimal digits, others for others."""
    return _digest(_plain(circumstances))[:16]


def to_json(remembered: Remembered, circumstances: ProfileKey, overhead: float) -> str:
    """As JSON, for the same circumstances."""
    content = {
        "format": FORMAT,
        "circumstances": _plain(circumstances),
        "overhead": overhead,
        "profile": asdict(remembered.profile),
        "choice": asdict(remembered.choice),
        "intervals": [remembered.intervals.memory, remembered.intervals.storage] if remembered.intervals else None,
    }
    return json.dumps({**content, "digest": _digest(content)}, indent=1)


def from_json(text: str, circumstances: ProfileKey, overhead: float) -> Remembered | Ignored:
    """What `to_json` gave, if it is whole and of these circumstances.

    For another overhead the profile stands, the choice is made anew, and the intervals are forgotten.
    """
    try:
        content = _content(text)
    except ValueError as error:
        return Ignored(str(error))
    found = content["circumstances"]
    wanted = _plain(circumstances)
    if found != wanted:
        others = [name for name in wanted if not isinstance(found, dict) or found.get(name) != wanted[name]]
        return Ignored(f"it is of other circumstances: {', '.join(others) or 'it names more'}")
    try:
        return _remembered(content, overhead)
    except (ConfigError, TypeError, ValueError) as error:
        return Ignored(f"it cannot be used: {error}")


def to_numbers(progress: ProfilingProgress | None, circumstances: ProfileKey | None) -> dict[str, float]:
    """A profile that goes on in the next run, as numbers alone: always equally many, of the same types."""
    if progress is None or circumstances is None:
        return dict.fromkeys(("circumstances", *_COUNTS), 0) | dict.fromkeys(_MEASURED, 0.0) | dict.fromkeys(_SIZES, 0)
    values = vars(progress.profile) | {name: getattr(progress, name) for name in _COUNTS}
    measured = {name: nan if values[name] is None else float(values[name]) for name in _MEASURED}
    whole = {name: int(values[name]) for name in _COUNTS + _SIZES}
    return {"circumstances": _number(circumstances), **whole, **measured}


def from_numbers(numbers: Any, circumstances: ProfileKey) -> ProfilingProgress | None:
    """What `to_numbers` gave, if it is of these circumstances and tells anything; else None."""
    if not isinstance(numbers, Mapping) or numbers.get("circumstances") != _number(circumstances):
        return None
    try:
        counts = {name: index(numbers[name]) for name in _COUNTS}
        measured: dict[str, Any] = {name: float(numbers[name]) for name in _MEASURED}
        sizes = {name: index(numbers[name]) for name in _SIZES}
        if isnan(measured["device_copy"]):
            measured["device_copy"] = None
        return ProfilingProgress(Profile(**measured, **sizes), **counts)
    except (ConfigError, KeyError, TypeError, ValueError):
        return None


def _number(circumstances: ProfileKey) -> int:
    return int(key(circumstances)[:12], 16)


def _content(text: str) -> dict[str, Any]:
    """The fields of a whole cache; raises ValueError."""
    if len(text) > LARGEST:
        raise ValueError(f"it has {len(text)} characters; a cache has at most {LARGEST}")
    try:
        content = json.loads(text)
        digest = content.pop("digest", None) if isinstance(content, dict) else None
        whole = digest == _digest(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {str(error)[:200]}") from error
    if not isinstance(content, dict):
        raise ValueError(f"it is a {type(content).__name__}, no object")
    if content.get("format") != FORMAT:
        raise ValueError(f"its format is {str(content.get('format'))[:20]}; this version reads {FORMAT}")
    if not whole:
        raise ValueError("it is damaged: its digest does not fit")
    if missing := {"circumstances", "overhead", "profile", "choice", "intervals"} - content.keys():
        raise ValueError(f"it has no {min(missing)}")
    return content


def _remembered(content: Mapping[str, Any], overhead: float) -> Remembered:
    profile = Profile(**content["profile"])
    choice = choose(profile, overhead)
    if content["overhead"] != overhead:
        return Remembered(profile, choice)
    if asdict(choice) != content["choice"]:
        raise ValueError("its choice does not follow from its profile")
    intervals = content["intervals"]
    return Remembered(profile, choice, Intervals(*map(index, intervals)) if intervals else None)


def _plain(circumstances: ProfileKey) -> dict[str, Any]:
    return {**vars(circumstances), "versions": dict(circumstances.versions)}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
