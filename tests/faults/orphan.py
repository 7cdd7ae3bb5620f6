"""A worker that outlives its agent and never stops to write: ``orphan.py <train.py> <its arguments>``.

In the first launch, the kernel is asked not to kill it with its agent, and it comes to no end of the fill of a save:
the bytes of the images in that slot change for as long as it lives.
"""

import ctypes
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from fastckpt._core import metrics
from fastckpt._core.transfer import host_copy

STEP = 18
_PR_SET_PDEATHSIG = 1


def write_without_end(out: Path) -> None:
    def copy(target: int, _: int, size: int) -> None:
        (out / f"orphan.{os.getpid()}").touch()
        while True:
            ctypes.memmove(target, os.urandom(size), size)
            time.sleep(0.0005)

    host_copy._copy_holding_gil = host_copy.copy_without_gil = copy  # ty: ignore


def main() -> None:
    out = Path(sys.argv[sys.argv.index("--out") + 1])
    if os.environ["FAULTS_LAUNCH"] == "1":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)

        def observe(phase: str, fields: dict[str, Any]) -> None:
            if (phase, fields.get("step")) == ("snapshot.fill", STEP):
                write_without_end(out)

        metrics.observe(observe)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
