"""What a fault has cost a job, by what the workers of its hosts have logged."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Line = dict[str, Any]
Losses = dict[tuple[int, str], set[str]]
"""Of each step and batch all losses that it had: several, if it was done several times and not alike."""


def losses_of(lines: list[Line]) -> Losses:
    found: Losses = {}
    for line in lines:
        if line["what"] == "step":
            for batch, loss in line["losses"].items():
                found.setdefault((line["step"], batch), set()).add(loss)
    return found


@dataclass(frozen=True)
class Recovery:
    """What a fault has cost.

    Attributes:
        seconds: From the fault until each node has done a step again.
        step: From which it goes on.
        lost: Steps that are done again.
        tiers: Of each node, from where its worker resumed.
        ranks: Of each node, the rank of its worker.
        starts: Of each node, how often its worker was started since the fault.
        restarts: The largest count of restarts that one of these workers was told.
        still: Of each node, the longest time between two steps since the fault.
    """

    seconds: float
    step: int
    lost: int
    tiers: dict[int, str]
    ranks: dict[int, int]
    starts: dict[int, int]
    restarts: int
    still: dict[int, float]


def _is_start(line: Line, since: float) -> bool:
    return line["what"] == "started" and line["at"] > since


def _newest(lines: list[Line], since: float, world: int) -> tuple[Line, Line] | None:
    """What the newest worker of a node has loaded, and its first step."""
    starts = [index for index, line in enumerate(lines) if _is_start(line, since)]
    if not starts or lines[starts[-1]]["world"] != world:
        return None
    own = [line for line in lines[starts[-1] :] if line["pid"] == lines[starts[-1]]["pid"]]
    loaded = next((line for line in own if line["what"] == "loaded"), None)
    stepped = next((line for line in own if line["what"] == "step"), None)
    return (loaded, stepped) if loaded and stepped else None


def _standstill(lines: list[Line], since: float) -> float:
    """The longest time without a step from the last one before the fault on."""
    steps = [line["at"] for line in lines if line["what"] == "step"]
    return max((late - early for early, late in pairwise(steps) if late > since), default=0.0)


def recovery(logs: dict[int, list[Line]], nodes: Collection[int], since: float) -> Recovery | None:
    """What it cost until these nodes train, and no others; None while they do not.

    Args:
        logs: What each node has logged, also those that are lost.
        nodes: Those that go on.
        since: When the fault was, by the clock of the logs.
    """
    news = {number: _newest(logs.get(number, []), since, len(nodes)) for number in nodes}
    found = {number: new for number, new in news.items() if new is not None}
    if len(found) < len(nodes):
        return None
    starts = {number: [line for line in logs[number] if _is_start(line, since)] for number in nodes}
    all_starts = [line for lines in starts.values() for line in lines]
    first = min(line["at"] for line in all_starts)
    before = [line for lines in logs.values() for line in lines if line["what"] == "step" and line["at"] < first]
    step = min(loaded["step"] for loaded, _ in found.values())
    return Recovery(
        seconds=max(stepped["at"] for _, stepped in found.values()) - since,
        step=step,
        lost=max(line["step"] for line in before) - step,
        tiers={number: loaded["tier"] for number, (loaded, _) in found.items()},
        ranks={number: loaded["rank"] for number, (loaded, _) in found.items()},
        starts={number: len(lines) for number, lines in starts.items()},
        restarts=max(line["restarts"] for line in all_starts),
        still={number: _standstill(logs[number], since) for number in nodes},
    )
