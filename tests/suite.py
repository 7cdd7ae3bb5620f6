"""All tests, as `make test` runs them; those that fail are run once more, alone.

Four tests at a time share a machine of two cores, and each may run a job of several processes: one of thousands meets
a time limit there once in a while. Alone it passes; a defect fails again. What passed only alone is named at the end,
to be mended. More failures than a few are no accident, and nothing else than failed tests is forgiven: an error of the
collection or an interrupted run ends as it is.
"""

import json
import subprocess
import sys
from pathlib import Path

ACCIDENTS = 3
"""How many tests may fail beside the others."""
FAILED = Path(".pytest_cache/v/cache/lastfailed")
PYTEST = (sys.executable, "-m", "pytest")


def main(*options: str) -> int:
    """Run the tests that pytest's options select; pytest's exit code."""
    FAILED.unlink(missing_ok=True)
    code = subprocess.call([*PYTEST, "-q", *options])
    if code != 1:
        return code
    failed = sorted(json.loads(FAILED.read_text()))
    if len(failed) > ACCIDENTS:
        return code
    print(f"{len(failed)} failed; run once more, alone:", *failed, sep="\n  ", flush=True)
    if code := subprocess.call([*PYTEST, "-v", *failed]):
        return code
    print("passed only alone, to be mended:", *failed, sep="\n  ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
