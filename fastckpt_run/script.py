"""Find the script that workers are to run; refuse to start them if it is not there."""

import shutil
from difflib import get_close_matches
from pathlib import Path

import click
from torch.distributed.elastic.agent.server.api import WorkerSpec

from fastckpt_run.preload.preloader import runs_script
from fastckpt_run.workers import run_script_path


def require_script(spec: WorkerSpec) -> None:
    """Raise a click.ClickException that names the script if no worker could find it.

    An interpreter that the user put in place of ours may find scripts where we cannot; it is not checked.
    """
    if callable(spec.entrypoint):
        if spec.entrypoint is not run_script_path:
            return
        script = spec.args[0]
        found = Path(script).exists()
    elif runs_script(spec):
        script = spec.args[1]
        found = script in ("-", "-m") or Path(script).exists()
    else:
        script = spec.entrypoint
        found = shutil.which(str(script)) is not None or Path(str(script)).exists()
    if not found:
        folder, name = Path(str(script)).parent, Path(str(script)).name
        near = get_close_matches(name, [each.name for each in folder.iterdir()], 1) if folder.is_dir() else []
        question = f"; did you mean {folder / near[0]}?" if near else ""
        raise click.ClickException(
            f"no such script: {script}; there is no file {name} in {folder.resolve()}: give its path{question}"
        )


def script_of(spec: WorkerSpec) -> Path | None:
    """The file that workers run by this interpreter; None if it is a module, or they run something else."""
    if spec.entrypoint is run_script_path and spec.args:
        path = Path(spec.args[0])
    elif runs_script(spec):
        path = Path(spec.args[1])
    else:
        return None
    return path if path.is_file() else None
