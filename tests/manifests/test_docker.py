"""The Dockerfile in examples/docker."""

import json
import re
import subprocess
import sys
from pathlib import Path

from fastckpt._core.version import VERSION
from fastckpt_run.options import parse

FILE = Path(__file__).parents[2] / "examples/docker/Dockerfile"


def test_the_linter_has_no_objection() -> None:
    command = [str(Path(sys.executable).parent / "hadolint"), "--no-color", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_installs_this_version_and_starts_what_the_launcher_understands() -> None:
    instructions = dict(line.split(" ", 1) for line in FILE.read_text().splitlines() if re.match("[A-Z]+ ", line))
    assert instructions["ARG"] == f"FASTCKPT={VERSION}" and int(instructions["USER"]) > 0
    command = json.loads(instructions["ENTRYPOINT"]) + json.loads(instructions["CMD"])
    settings, arguments = parse(command[1:])
    assert command[0] == "fastckpt-run" and settings.exit_codes and arguments.standalone
    assert arguments.training_script == "train.py" in instructions["COPY"]  # the last one
    assert (
        "RUN pip install --no-cache-dir torch==2.13.0 /opt/fastckpt_run-$FASTCKPT-py3-none-any.whl" in FILE.read_text()
    )
