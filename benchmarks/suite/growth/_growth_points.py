"""Axes along which things grow, and the costs that are measured at their points."""

from typing import NamedTuple


class Axis(NamedTuple):
    """Quantity that grows.

    Attributes:
        name: Of the contender.
        title: With its unit.
        points: Sizes at which costs are measured.
        quick: The same with ``--quick``; none, if empty.
        costs: Costs that are measured.
    """

    name: str
    title: str
    points: tuple[float, ...]
    quick: tuple[float, ...]
    costs: tuple[str, ...]


LIFE = ("save", "copy", "agent", "persist", "write", "resume from memory", "resume from storage", "start")
VISIT = ("persist", "agent", "first persist", "resume from storage", "fastckpt ls", "start")
AXES = (
    Axis("state", "state, GB", (0.1, 0.3, 1, 2, 4), (0.1, 0.4), LIFE),
    Axis("tensors", "tensors", (100, 1000, 10_000, 100_000), (100, 10_000), LIFE),
    Axis("ranks", "ranks", (1, 2, 4, 8), (), LIFE),
    Axis("checkpoints", "checkpoints kept", (1, 10, 100, 1000), (1, 100), VISIT),
    Axis("files", "other files", (10, 1000, 10_000, 100_000), (), VISIT),
    Axis("events", "events in the log", (1000, 10_000, 100_000), (), ("fastckpt report", "agent", "start")),
)
MEANING = {
    "save": "save to memory",
    "copy": "copy of its bytes",
    "agent": "agent's processor time per save",
    "persist": "persist",
    "write": "bare write of its bytes",
    "first persist": "first persist of a launch",
    "start": "start of a launch",
}
"""Costs whose names in tables are others."""


def words(cost: str) -> str:
    """A cost as a reader would call it."""
    return MEANING.get(cost, cost)


def quantity(cost: str, point: float) -> str:
    """The name of a cost at a point; without dots, which end the names of contenders."""
    return f"{cost} at {point:g}".replace(".", ",")
