"""Has the first process of a host that comes to a phase, for the n-th time, wait there.

Python imports this before anything else.
"""

import itertools
import os
import time
from pathlib import Path
from typing import Any

from fastckpt._core import metrics

_FOLDER = Path(os.environ["NODES_PAUSE_FOLDER"])
_LONGEST = 120.0
_visits = itertools.count(1)


def _observe(phase: str, _: dict[str, Any]) -> None:
    if phase != os.environ["NODES_PAUSE_PHASE"] or next(_visits) < int(os.environ["NODES_PAUSE_NTH"]):
        return
    try:
        (_FOLDER / "reached").touch(exist_ok=False)
    except FileExistsError:
        return
    end = time.monotonic() + _LONGEST
    while not (_FOLDER / "go").exists() and time.monotonic() < end:
        time.sleep(0.02)


metrics.observe(_observe)
