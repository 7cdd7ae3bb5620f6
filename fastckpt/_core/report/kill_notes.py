"""The plan of a run for `fastckpt prove`, and notes of the kills that were made: files in a folder of the run."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastckpt._core.policy.planned_kills import PlannedKill

_PLAN = "plan.json"


def write_plan(folder: Path, within: str, kills: Sequence[PlannedKill]) -> None:
    """Leave the plan for the processes of a run, which may open checkpoint directories within one only."""
    (folder / _PLAN).write_text(json.dumps({"within": within, "kills": [asdict(kill) for kill in kills]}))


def planned(folder: Path) -> list[PlannedKill]:
    """The kills of a run that were not made yet."""
    kills = (PlannedKill(**kill) for kill in json.loads((folder / _PLAN).read_text())["kills"])
    return [kill for kill in kills if not _note_of(folder, kill).exists()]


def allowed_place(folder: Path) -> str:
    """The directory within which the processes of a run may open checkpoint directories."""
    return str(json.loads((folder / _PLAN).read_text())["within"])


def claim(folder: Path, kill: PlannedKill, phase: str, step: int) -> bool:
    """Note that a kill is made now; False if it was made already."""
    try:
        fd = os.open(_note_of(folder, kill), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    os.write(fd, json.dumps({"phase": phase, "step": step, "time": time.time()}).encode())
    os.close(fd)
    return True


def made(folder: Path, kill: PlannedKill) -> dict[str, Any] | None:
    """Return the note of a kill: its phase, step and time; None if it was not made."""
    path = _note_of(folder, kill)
    return dict(json.loads(path.read_text())) if path.exists() else None


def _note_of(folder: Path, kill: PlannedKill) -> Path:
    return folder / f"kill-{kill.number}"
