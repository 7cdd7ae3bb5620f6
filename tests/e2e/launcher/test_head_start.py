"""The head start of a template: begun before the launcher imports torch, and used only if it is as a later one."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt_run.preload import head_start
from tests.conftest import ROOT
from tests.e2e.launcher.conftest import LIGHT, alive, until

WATCHING = """
import os, sys
from pathlib import Path

class Watch:
    def find_spec(name, *_):
        if name == "torch":
            here = Path("/proc/self/task") / str(os.getpid())
            (Path(os.environ["JOB_FOLDER"]) / f"children.{os.getpid()}").write_text((here / "children").read_text())

if "template.main" in " ".join(sys.orig_argv):
    from fastckpt_run.preload import imports
    imports.BASE = ("multiprocessing",)
else:
    sys.meta_path.insert(0, Watch)
"""
"""A sitecustomize: templates are light; others that import torch note which children they have at that moment."""
SCRIPT = """
import os
from pathlib import Path
agent = os.getppid()
children = Path(f"/proc/{agent}/task/{agent}/children").read_text()
(Path(os.environ["JOB_FOLDER"]) / f"pid.{os.getpid()}").write_text(f"{agent} {children}")
print(os.environ.get("TORCH_CPP_LOG_LEVEL"))
"""


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Templates that import little, and are ended."""
    monkeypatch.setenv("PYTHONPATH", LIGHT)
    for name in ("FASTCKPT_PRELOAD", "PET_NPROC_PER_NODE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    yield
    head_start.end()


def launch(folder: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Execute a launcher in a folder, in which each process notes what it has when it imports torch."""
    (folder / "sitecustomize.py").write_text(WATCHING)
    (folder / "train.py").write_text(SCRIPT)
    own = {"JOB_FOLDER": str(folder), "TMPDIR": str(folder), "PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-m", "fastckpt_run", *arguments]
    environment = os.environ | own | variables
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [[], ["--fast-no-preload", "train.py"], ["--run_path", "train.py"]])
def test_no_template_is_begun_where_none_or_another_may_be_needed(arguments: list[str]):
    head_start.begin(arguments)
    assert head_start.take() is None


def test_a_template_that_a_later_one_would_differ_from_is_ended(monkeypatch: pytest.MonkeyPatch):
    def change_a_limit() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0 if soft else hard and 1, hard))

    limits = resource.getrlimit(resource.RLIMIT_CORE)
    try:
        for change in (lambda: monkeypatch.setenv("SOMETHING", "else"), change_a_limit):
            head_start.begin(["train.py"])
            (template,) = head_start._begun
            change()
            assert head_start.take() is None
            until(lambda pid=template.pid: not alive(pid), "the end of the template")
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, limits)


def test_the_template_of_a_launch_is_begun_before_the_launcher_imports_torch(tmp_path: Path) -> None:
    """And what torch logs in workers is as the user wants it."""
    ended = launch(tmp_path, "--nproc-per-node=2", "train.py", TORCH_CPP_LOG_LEVEL="INFO")
    assert (ended.returncode, ended.stdout) == (0, "INFO\n" * 2), ended.stderr
    notes = [path.read_text().split() for path in tmp_path.glob("pid.*")]
    assert len(notes) == 2
    for agent, *children in notes:
        (template,) = (tmp_path / f"children.{agent}").read_text().split()
        assert template in children


def test_no_template_stays_where_workers_are_not_forked(tmp_path: Path) -> None:
    """The guess knows no abbreviations, and no variables of torchrun's."""
    ended = launch(tmp_path, sys.executable, "train.py", PET_NO_PYTHON="1")
    assert ended.returncode == 0, ended.stderr
    (note,) = tmp_path.glob("pid.*")
    assert note.read_text().split()[1:] == [note.suffix[1:]]  # the worker is the agent's only child
