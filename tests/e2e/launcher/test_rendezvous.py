"""A rendezvous without torch's detours."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "rendezvous.py"


def test_rendezvous_rounds_complete_at_the_first_attempt():
    """In a process of its own: nothing else ends the sockets of torch's stores."""
    environment = os.environ | {"PYTHONPATH": f"{PROGRAM.parents[4]}:{os.environ['PYTHONPATH']}"}
    done = subprocess.run(
        [sys.executable, PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "as it should be\n", done.stderr
