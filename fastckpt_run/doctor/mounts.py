"""Mounts of this host, as the kernel lists them."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

_TABLE = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Mount:
    """A mounted file system: its mount point, kind, source and options."""

    point: str
    kind: str
    source: str
    options: str


def mount_of(path: Path) -> Mount | None:
    """The mount that a path is on; None where the kernel does not report it."""
    real = os.path.realpath(path)
    found = [each for each in _mounts() if real == each.point or real.startswith(each.point.rstrip("/") + "/")]
    # Of several on one point the last covers the others.
    return max(enumerate(found), key=lambda pair: (len(pair[1].point), pair[0]))[1] if found else None


def _mounts() -> list[Mount]:
    try:
        lines = _TABLE.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    found = list[Mount]()
    for line in lines:
        before, _, after = line.partition(" - ")
        first, second = before.split(), after.split()
        if len(first) >= 6 and len(second) >= 2:
            found.append(Mount(_unescaped(first[4]), second[0], _unescaped(second[1]), f"{first[5]},{second[-1]}"))
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
