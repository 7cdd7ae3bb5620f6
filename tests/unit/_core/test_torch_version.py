"""Torch versions: one too old is reported in one sentence, a newer one than was tried in a warning."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fastckpt._core.torch_version import NEEDED

ROOT = Path(__file__).parents[3]
COMMANDS = {
    "fastckpt-run": ("-m", "fastckpt_run", "--help"),
    "fastckpt": ("-c", "from fastckpt_run.commands import tools; tools()", "--help"),
}


def python(folder: Path, torch: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where torch says that it is of this release; nothing of it is to be imported."""
    found = folder / "torch/version.py"
    found.parent.mkdir(exist_ok=True)
    found.write_text(
        f"from typing import Optional\n\n__all__ = ['__version__']\n__version__ = '{torch}'\ndebug = False\n"
    )
    (folder / "torch/__init__.py").write_text("raise AssertionError('torch was imported')")
    paths = os.pathsep.join([str(folder), os.environ["PYTHONPATH"], str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_supported_torch_versions_are_those_of_the_project_file():
    assert NEEDED in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_reports_in_one_line_that_torch_is_too_old(tmp_path: Path, command: str):
    ended = python(tmp_path, "2.8.0+cu128", *COMMANDS[command])
    assert ended.returncode == 2 and not ended.stdout
    needs = f"torch 2.8.0+cu128 is too old for fastckpt; pip install '{NEEDED}' (FC-042, docs/errors.md#fc-042)"
    assert ended.stderr == f"{command}: error: {needs}\n"


def test_a_script_reports_last_that_torch_is_too_old(tmp_path: Path):
    ended = python(tmp_path, "2.9.1", "-c", "from fastckpt.ddp import DdpCheckpointer")
    assert ended.returncode == 1
    text = f"torch 2.9.1 is too old for fastckpt; pip install '{NEEDED}' (FC-042, docs/errors.md#fc-042)"
    assert ended.stderr.splitlines()[-1].endswith(text)


def test_a_newer_torch_gets_a_warning_and_one_of_an_unknown_version_none(tmp_path: Path):
    ended = python(tmp_path, "2.16.0.dev20261101", "-c", "import fastckpt")
    assert ended.returncode == 0
    assert "torch 2.16.0.dev20261101 is newer than all" in ended.stderr and NEEDED in ended.stderr
    ended = python(tmp_path, "unknown", "-c", "import fastckpt")
    assert (ended.returncode, ended.stderr) == (0, "")
