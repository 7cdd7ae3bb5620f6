"""Messages that are not true."""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

VALUES: Sequence[Any] = (
    None, True, False, 0, -1, 1, 1.5, 1 << 31, 1 << 63, 1 << 70, 10**30, 1e308, float("inf"), float("nan"),
    "", "0", "..", "../../outside", "/etc/passwd", ".done-0", "a/../b", "\0", "\ud800", "x" * 5000, "9" * 5000,
    [], {}, [[]], [[[[[]]]]], [0, 0], [1, 5], {"": ""}, {"0": {}}, [None] * 3, ["model.pt", 1 << 40],
    json.loads(400 * "[" + 400 * "]"),
)  # fmt: skip
"""What is put in the place of a value."""


def untrue(message: Any, chance: random.Random) -> Any:
    """A message with one to three of its parts changed, removed, added, or exchanged for another of its parts."""
    found = json.loads(json.dumps(message))
    for _ in range(chance.randint(1, 3)):
        places = [*_places(found)]
        if not places:
            return found
        inside, at = chance.choice(places)
        match chance.randrange(6):
            case 0:
                del inside[at]
            case 1 if isinstance(inside, dict):
                inside[str(chance.choice(VALUES))] = inside.pop(at)
            case 2:
                there, other = chance.choice(places)
                inside[at] = json.loads(json.dumps(there[other]))
            case 3 if type(inside[at]) is int:
                inside[at] += chance.choice((-1, 1, 1 << 20))
            case _:
                inside[at] = json.loads(json.dumps(chance.choice(VALUES)))
    return found


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """The parts of a message: what each is in, and its key there; but for those that are nested deeply."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in [*inner]:
        if key != "ask":
            yield value, key
        if depth < 20:
            yield from _places(part, depth + 1)
