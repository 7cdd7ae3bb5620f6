"""The table of docs/reference/events.md, and whether an event is as it says."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[4] / "docs/reference/events.md"
COMMON = {"event", "time", "monotonic", "pid"}
_ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<who>[a-z, ]+) \| [^|]+ \| (?P<fields>[^|]*) ?\|$", re.MULTILINE)
_FIELD = re.compile(r"`(\w+)`(?: (\w+))?(\?)?(?:, |$)")
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "s": (float, int), "mono": (float,), "text": (str,), "share": (float, int), "flag": (bool,),
    "list": (list,), "object": (dict,),
}  # fmt: skip


def table() -> dict[str, dict[str, tuple[str, bool]]]:
    """By name of the event and of the field: its type, and whether it must be there."""
    found = {}
    for row in _ROW.finditer(PAGE.read_text()):
        fields = row["fields"].strip()
        found[row["name"]] = {name: (kind or "int", not optional) for name, kind, optional in _FIELD.findall(fields)}
        assert _FIELD.sub("", fields) == "", f"{row['name']}: {fields}"
        assert all(kind in _TYPES for kind, _ in found[row["name"]].values()), row["name"]
    return found


def faults(event: dict[str, Any]) -> list[str]:
    """What is wrong with an event."""
    if event.get("event") not in (known := table()):
        return [f"{event.get('event')} is not in the table"]
    fields, name = known[event["event"]], event["event"]
    found = [f"{name} lacks {field}" for field in COMMON - event.keys()]
    found += [f"{name}.{field} is not in the table" for field in event.keys() - fields.keys() - COMMON]
    for field, (kind, required) in fields.items():
        value = event.get(field)
        if value is None:
            found += [f"{name} lacks {field}"] if required else []
        elif not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "flag"):
            found.append(f"{name}.{field} is {value!r}, no {kind}")
    return found
