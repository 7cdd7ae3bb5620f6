"""Addresses of checkpoints as a user types them: ``DIR@STEP``, a directory, or a file."""

import os
import re
from dataclasses import dataclass

from fastckpt._core.storage.store import as_path
from fastckpt.errors import ConfigError

_SUFFIX = re.compile(
    r"(?P<where>.*)@(?:latest|(?P<step>\d{1,19})(?:\.(?P<history>\d{1,19}))?)(?::(?P<tier>\w+))?", re.S
)
_TIERS = ("memory", "storage", "remote")


@dataclass(frozen=True)
class Address:
    """The address of a checkpoint in a directory.

    Attributes:
        location: The checkpoint directory: a path, or a URL.
        step: Its step; None for the newest.
        history: Its history; None for the newest that has the step.
        tier: "memory", "storage" or "remote"; "" for any.
        explicit: True if more was given than the location.
    """

    location: str
    step: int | None = None
    history: int | None = None
    tier: str = ""
    explicit: bool = False

    def __str__(self) -> str:
        if not self.explicit:
            return self.location
        step = "latest" if self.step is None else str(self.step)
        history = "" if self.history is None else f".{self.history}"
        return f"{self.location}@{step}{history}{self.tier and ':' + self.tier}"


def parse(text: str) -> Address:
    """Read ``LOCATION[@STEP[.HISTORY][:TIER]]``, where STEP may be ``latest``.

    A path that exists is taken as it is, also with ``@`` in its name; ``run@5@7`` is step 7 of ``run@5``.

    Raises:
        ConfigError: The tier is none.
    """
    match = None if os.path.lexists(text) else _SUFFIX.fullmatch(text)
    if match is None or not match["where"]:
        return Address(as_path(text))
    if match["tier"] not in (None, *_TIERS):
        raise ConfigError(f"the tier in {text!r} is {match['tier']!r}; give one of {', '.join(_TIERS)}")
    step, history = (None if match[name] is None else int(match[name]) for name in ("step", "history"))
    return Address(as_path(match["where"]), step, history, match["tier"] or "", explicit=True)
