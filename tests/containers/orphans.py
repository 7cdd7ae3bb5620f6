"""A script that leaves orphans, and waits until the first process of its container has reaped them."""

import os
import sys
import time
from pathlib import Path

ORPHANS = 3


def zombies() -> int:
    states = [path.read_text().rpartition(")")[2].split()[:2] for path in Path("/proc").glob("[0-9]*/stat")]
    return sum(state == "Z" and parent == "1" for state, parent in states)


def main() -> None:
    for _ in range(ORPHANS):
        child = os.fork()
        if not child:
            if os.fork():
                os._exit(0)  # its child is an orphan
            time.sleep(0.05)
            os._exit(0)
        os.waitpid(child, 0)
    end = time.monotonic() + 10
    time.sleep(0.1)
    while (left := zombies()) and time.monotonic() < end:
        time.sleep(0.02)
    report = Path(sys.argv[1])
    written = report.with_suffix(".written")
    written.write_text(f"{left} zombies, agent {os.getppid()}")
    written.rename(report)  # whoever finds it may read it at once
    time.sleep(600)


if __name__ == "__main__":
    main()
