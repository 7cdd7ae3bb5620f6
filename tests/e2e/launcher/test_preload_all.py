"""All other tests of the launcher, with workers that are forked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_all_launcher_tests_pass_with_forked_workers() -> None:
    modules = sorted(str(path) for path in HERE.glob("test_*.py") if "preload" not in path.name)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *modules]
    # within the folder of this test, names of sockets would be too long
    environment = os.environ | {"TEST_PRELOAD": "math", "TMPDIR": "/tmp"}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-10_000:]
