"""The newest values of metrics in event logs: of each node, the last record of its last agent."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fastckpt._core.report.events import Event, whole
from fastckpt._core.report.metric_table import PREFIX, parse_key

_TEXTS = ("NaN", "+Inf", "-Inf")
_LONGEST, _LARGEST = 400, 1e300


@dataclass(frozen=True)
class Measured:
    """The values that one node has recorded last.

    Attributes:
        at: Time, in nanoseconds since the epoch.
        step: The step that its furthest worker had completed.
        values: By name and labels, as in docs/reference/events.md; the texts NaN, +Inf and -Inf are not finite.
    """

    node: int
    at: int
    step: int
    values: Mapping[str, float | str]

    def number(self, key: str) -> float | None:
        """A value that should be there, and finite."""
        value = self.values.get(key)
        return None if value is None or isinstance(value, str) else float(value)

    def logged(self) -> dict[str, float | str]:
        """Values that the scripts logged, by name, of the first rank that has logged any."""
        found = dict[int, dict[str, float | str]]()
        for key, value in self.values.items():
            name, labels = parse_key(key)
            if name == f"{PREFIX}user" and labels.get("rank", "").isascii() and labels["rank"].isdigit():
                found.setdefault(int(labels["rank"]), {})[labels.get("name", "")] = value
        return found[min(found)] if found else {}


def measured(node: int, events: Iterable[Event], offset: int) -> Measured | None:
    """The last values among events; ``offset`` makes an instant of their clock one since the epoch."""
    last = next((event for event in reversed([*events]) if event["event"] == "metrics"), None)
    if last is None:
        return None
    given = last.get("values")
    values = {key: value for key, value in given.items() if _is_value(key, value)} if isinstance(given, dict) else {}
    return Measured(node, round(last["monotonic"] * 1e9) + offset, whole(last, "step", 0), values)


def _is_value(key: str, value: object) -> bool:
    """Return whether it may be a metric and its value: a log is no promise."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
    return key.startswith(PREFIX) and len(key) <= _LONGEST and (value in _TEXTS or number)
