"""Traces the files of the product that one rank enters to save and to load a checkpoint, and changes between them.

    python benchmarks/trace_ways.py [--ranks 2] [--details]

Traces the main thread of rank 0 with sys.setprofile in `DdpCheckpointer.save_checkpoint` and `load_checkpoint`, from
storage and from memory, of jobs under a real fastckpt-run: storage has one checkpoint, and memory all its slots in use.
A change of file is a call of a function in another file than that of the nearest product function on the stack; its
return is not counted. Modules that are imported in between are not counted either. With ``--details`` each file has its
number of entries, and the most frequent changes are listed.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
GOALS = {"save": (18, 60), "load from memory": (25, 120), "load from storage": (25, 120)}
"""Most files and changes that we allow ourselves."""


class Trace:
    """Product files that the current thread enters while this is active."""

    def __init__(self) -> None:
        self.changes: Counter[tuple[str, str]] = Counter()
        self.files: set[str] = set()
        self._stack: list[str] = []

    def __enter__(self) -> "Trace":
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        file = product_file(frame)
        if file is None:
            return
        if event == "call":
            if self._stack and self._stack[-1] != file:
                self.changes[self._stack[-1], file] += 1
            self.files.add(file)
            self._stack.append(file)
        elif event == "return" and self._stack:
            self._stack.pop()

    def record(self) -> dict[str, Any]:
        """Return the observations for JSON."""
        return {"files": sorted(self.files), "changes": [[*pair, count] for pair, count in self.changes.most_common()]}


def product_file(frame: FrameType) -> str | None:
    """The file of a function of the product, relative to its root; None for all else."""
    name = frame.f_code.co_filename
    if frame.f_code.co_name == "<module>" or not name.startswith((f"{ROOT}/fastckpt/", f"{ROOT}/fastckpt_run/")):
        return None
    return name.removeprefix(f"{ROOT}/")


def worker(out: Path) -> None:
    """One rank: load, save until memory and storage hold a checkpoint; the first start ends by SIGKILL."""
    from fastckpt import DdpCheckpointer, StorageType

    torch.distributed.init_process_group("gloo")
    rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def traced(name: str, work: Callable[[], Any]) -> None:
        with Trace() as trace:
            work()
        if rank == 0:
            (out / f"{name}.json").write_text(json.dumps(trace.record()))

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with DdpCheckpointer(out / "checkpoints") as checkpointer:
        is_first = not (out / "checkpoints").exists() or not any((out / "checkpoints").glob("checkpoint-*"))
        traced("load", checkpointer.load_checkpoint)
        if checkpointer.loaded_from and rank == 0:
            (out / "load.json").rename(out / f"load from {checkpointer.loaded_from}.json")
        if not is_first:
            return
        for step in range(1, 5):
            model(torch.ones(64)).sum().backward()
            optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.distributed.barrier()
            place = StorageType.MEMORY if step < 4 else None  # one checkpoint on storage: loads look at each
            traced(
                "save", lambda step=step, state=state, place=place: checkpointer.save_checkpoint(step, state, "", place)
            )
            checkpointer.wait_latest_checkpoint()
        torch.distributed.barrier()
    if restarts == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def launch(out: Path, ranks: int) -> None:
    """Run a job once, with shared memory of its own."""
    shm = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="fastckpt-ways-"))
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FASTCKPT_SHM_DIR": str(shm), "TMPDIR": str(out)}
    script = [__file__, "--worker", str(out)]
    command = [sys.executable, "-m", "fastckpt_run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1"]
    try:
        done = subprocess.run([*command, *script], env=os.environ | own, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"the job has failed:\n{done.stdout}{done.stderr}")
    finally:
        shutil.rmtree(shm, ignore_errors=True)


def show(name: str, found: dict[str, Any], *, details: bool) -> None:
    """Print one way."""
    changes = sum(count for *_, count in found["changes"])
    files, most = GOALS[name]
    print(f"{name:18} {len(found['files']):3} files (goal {files}) {changes:4} changes of file (goal {most})")
    if not details:
        return
    entries: Counter[str] = Counter()
    for _, to, count in found["changes"]:
        entries[to] += count
    for file in found["files"]:
        print(f"    {entries[file]:4} {file}")
    for before, to, count in found["changes"][:20]:
        print(f"    {count:4} {before} -> {to}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--details", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    with tempfile.TemporaryDirectory(prefix="fastckpt-ways-") as folder:
        for _ in range(2):  # the second finds the checkpoint on storage alone
            launch(Path(folder), options.ranks)
        for name in GOALS:
            show(name, json.loads(Path(folder, f"{name}.json").read_text()), details=options.details)


if __name__ == "__main__":
    main()
