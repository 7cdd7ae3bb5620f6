"""A training run of the demo: its command, its files, and its processes for as long as they are needed."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

WORKERS = 2
TIMEOUT = 600.0
"""Seconds."""


class DemoError(Exception):
    """The demo could not be carried out."""


@dataclass(frozen=True)
class Run:
    """A training run and the files that it leaves in its folder."""

    folder: Path
    script: Path
    options: list[str]
    steps: int
    workers: int = WORKERS

    @property
    def events(self) -> Path:
        """The log of what happened when."""
        return self.folder / "events.jsonl"

    @property
    def losses(self) -> Path:
        """Every step's loss."""
        return self.folder / "losses.jsonl"

    @property
    def weights(self) -> Path:
        """The trained weights."""
        return self.folder / "weights.pt"

    @property
    def checkpoints(self) -> Path:
        """The checkpoint directory."""
        return self.folder / "checkpoints"

    def command(self) -> list[str]:
        """Return the command that starts it."""
        launcher = str(Path(sys.executable).with_name("fastckpt-run"))
        launch = [launcher, "--standalone", f"--nproc_per_node={self.workers}", "--max-restarts=1"]
        # torchrun's own choice is a temporary directory that nobody deletes.
        kept = ["--log-dir", str(self.folder / "logs"), "--fast-events", str(self.events)]
        files = {"checkpoint_dir": self.checkpoints, "losses": self.losses, "weights": self.weights}
        named = [text for name, path in files.items() for text in (f"--{name}", str(path))]
        return [*launch, *kept, str(self.script), *self.options, f"--max_steps={self.steps}", *named]

    def clear(self) -> None:
        """Remove what an earlier demo left."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """Its launcher; raises DemoError unless that ends well in time, and never leaves it behind."""
        command = self.command()
        say_command(command)
        # All runs take the same number of threads, since another one would sum in another order.
        threads = max(1, (os.cpu_count() or 1) // WORKERS)
        # DeepSpeed sets this when it is imported; set before, it may be imported once, for workers to be forked from.
        own = {"OMP_NUM_THREADS": str(threads), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        agent = subprocess.Popen(command, env=own | os.environ)
        try:
            yield agent
            if code := agent.wait(TIMEOUT):
                raise DemoError(f"the launcher ended with exit code {code}; its output above tells why")
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"the run did not end within {TIMEOUT:.0f} s") from error
        finally:
            _end(agent)


def say_command(command: list[str]) -> None:
    """Show what is started, as one would type it."""
    print(f"\n$ {shlex.join([Path(command[0]).name, *command[1:]])}", flush=True)


def _end(agent: subprocess.Popen[bytes]) -> None:
    if agent.poll() is None:
        agent.terminate()
        try:
            agent.wait(30)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()
