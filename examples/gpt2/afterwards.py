"""Uses of the checkpoints of a run that has ended: stock tools read them, other numbers of workers go on."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from examples.gpt2.report import read_lines
from examples.gpt2.run import TIMEOUT, DemoError, Run, say_command

CONVERT = ["-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]
UNIVERSAL = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]


def weights_equal(one: Path, other: Path) -> bool:
    """Return whether two files, of weights or of a whole state, hold the very same weights."""
    left, right = (torch.load(path) for path in (one, other))
    left, right = left.get("model", left), right.get("model", right)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def file_of_torch(run: Run) -> Path:
    """The last checkpoint as a file that ``torch.load`` reads, made by its framework's own command if it is sharded."""
    checkpoint = run.checkpoints / f"checkpoint-{run.steps}"
    if tag := _deepspeeds(run):
        folder = run.folder / "converted"
        _convert([str(run.checkpoints / "zero_to_fp32.py"), str(run.checkpoints), str(folder), "--tag", tag])
        return folder / "pytorch_model.bin"
    if not (checkpoint / ".metadata").exists():
        return checkpoint / "model.pt"
    file = run.folder / "converted.pt"
    _convert([*CONVERT, str(checkpoint), str(file)])
    return file


def _deepspeeds(run: Run) -> str:
    """Return DeepSpeed's name of the last checkpoint; empty if that is not DeepSpeed's."""
    tracker = run.checkpoints / "latest"
    return tracker.read_text() if tracker.exists() else ""


def _convert(arguments: list[str]) -> None:
    command = [sys.executable, *arguments]
    say_command(command)
    if code := subprocess.run(command, timeout=TIMEOUT, check=False).returncode:
        raise DemoError(f"the checkpoint could not be converted: exit code {code}")


def go_on(run: Run, further: int) -> str:
    """Train so many steps further with one worker, and tell where it found the state of several.

    Raises:
        DemoError: It did not resume where the run had ended, or has not done each step from there once.
    """
    tag = _deepspeeds(run)
    if tag:
        folder = run.checkpoints / tag
        _convert([*UNIVERSAL, "--input_folder", str(folder), "--output_folder", f"{folder}_universal"])
        run = replace(run, options=[*run.options, "--universal"])
    longer = replace(run, workers=1, steps=run.steps + further)
    done = len(read_lines(run.losses))
    with longer.started():
        pass
    resumed = [event for event in read_lines(run.events) if event["event"] == "resumed"][-1]
    # Steps of a checkpoint that another tool wrote are not known before DeepSpeed has loaded it.
    step, place = (run.steps, "a universal checkpoint") if tag else (resumed["step"], resumed["tier"])
    recorded = [record["step"] for record in read_lines(run.losses)[done:]]
    if step != run.steps or recorded != [*range(run.steps + 1, longer.steps + 1)]:
        raise DemoError(f"one worker resumed at step {step} instead of {run.steps}, and did {recorded}")
    return f"resumed at step {run.steps} from {place}, and did steps {recorded[0]} to {recorded[-1]}"
