"""Train twice, the second time with a worker killed midway, and show that the training did not notice."""

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL

import psutil
import torch

from examples.ddp_gpt2.picture import draw
from examples.ddp_gpt2.report import Comparison, Event, Failure, IncompleteRecordError, describe, read_lines
from fastckpt import metrics

TRAIN = Path(__file__).with_name("train.py")
WORKERS = 2
MODEL = "--n_layer 4 --n_head 4 --n_embd 128 --block_size 128 --batch_size 8 --lr 2e-3 --device cpu"
TIMEOUT = 600.0


class DemoError(Exception):
    """The demo could not be carried out."""


@dataclass(frozen=True)
class Run:
    """A training run and the files that it leaves in its folder."""

    folder: Path
    options: list[str]

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

    def command(self) -> list[str]:
        """What starts it."""
        launcher = str(Path(sys.executable).with_name("fastckpt-run"))
        launch = [launcher, "--standalone", f"--nproc_per_node={WORKERS}", "--max-restarts=1"]
        # torchrun's own choice is a temporary directory that nobody deletes.
        kept = ["--log-dir", str(self.folder / "logs"), "--fast-events", str(self.events)]
        files = {"checkpoint_dir": self.folder / "checkpoints", "losses": self.losses, "weights": self.weights}
        named = [text for name, path in files.items() for text in (f"--{name}", str(path))]
        return [*launch, *kept, str(TRAIN), *self.options, *named]

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """Its launcher; raises DemoError unless that ends well in time, and never leaves it behind."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        command = self.command()
        print(f"\n$ {shlex.join([Path(command[0]).name, *command[1:]])}", flush=True)
        # Both runs take the same number of threads, since another one would sum in another order.
        threads = max(1, (os.cpu_count() or 1) // WORKERS)
        agent = subprocess.Popen(command, env={"OMP_NUM_THREADS": str(threads), **os.environ})
        try:
            yield agent
            if code := agent.wait(TIMEOUT):
                raise DemoError(f"the launcher ended with exit code {code}; its output above tells why")
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"the run did not end within {TIMEOUT:.0f} s") from error
        finally:
            _end(agent)


def _end(agent: subprocess.Popen[bytes]) -> None:
    if agent.poll() is None:
        agent.terminate()
        try:
            agent.wait(30)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


def follow(path: Path, agent: subprocess.Popen[bytes]) -> Iterator[Event]:
    """Events as they are written, until the launcher has ended or the time is over."""
    path.touch()
    deadline, line = time.monotonic() + TIMEOUT, ""
    with path.open() as file:
        while agent.poll() is None and time.monotonic() < deadline:
            line += file.readline()
            if line.endswith("\n"):
                yield json.loads(line)
                line = ""
            else:
                time.sleep(0.02)


def kill_one_worker(run: Run, agent: subprocess.Popen[bytes], after_step: int) -> None:
    """SIGKILL one worker, any of them, at a random instant of the step after ``after_step``."""
    pids: dict[str, int] = {}
    first: Event = {}
    for event in follow(run.events, agent):
        if event["event"] == "workers_started":
            pids = event["pids"]
        elif event["event"] == "step" and event["step"] >= after_step:
            break
        elif event["event"] == "step":
            first = first or event
    else:
        raise DemoError(f"the run ended before step {after_step} was in its log")
    step_time = (event["time"] - first["time"]) / (event["step"] - first["step"])
    time.sleep(random.uniform(0.0, step_time))

    local_rank, pid = random.choice(sorted(pids.items()))
    worker = psutil.Process(pid)
    if agent.pid not in [parent.pid for parent in worker.parents()]:
        raise DemoError(f"process {pid} is not a worker of this run; nothing was killed")
    metrics.write_events_to(str(run.events))
    metrics.event("killed", local_rank=int(local_rank), victim=pid)
    worker.send_signal(SIGKILL)
    metrics.write_events_to("")
    print(f">>> SIGKILL to worker {local_rank} (pid {pid})", flush=True)


def step_to_kill(steps: int, memory: int, storage: int) -> int:
    """A random step of the middle half at which memory is newer than storage: the flush has work to do."""
    middle = range(steps // 4, 3 * steps // 4)
    steps_to_kill = [step for step in middle if 2 * memory <= step % storage < storage - 3]
    if not steps_to_kill:
        raise DemoError("memory is never newer than storage; give more steps, or save to storage less often")
    return random.choice(steps_to_kill)


def weights_equal(one: Path, other: Path) -> bool:
    """Whether two files hold the very same tensors."""
    left, right = torch.load(one), torch.load(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def show(reference: Run, killed: Run, picture: Path) -> bool:
    """Print the report, draw the picture, and tell whether training came back from memory unchanged."""
    failure = Failure.from_events(read_lines(killed.events))
    expected, found = read_lines(reference.losses), read_lines(killed.losses)
    losses, weights = Comparison.of(expected, found), weights_equal(reference.weights, killed.weights)
    draw(picture, failure, expected, found)
    print(f"\n{describe(failure, losses, weights)}\npicture         {picture}", flush=True)
    return failure.tier == "memory" and losses.equal == losses.steps and weights


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Other options go to train.py.")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for what the demo makes")
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument("--save_memory_interval", type=int, default=5)
    parser.add_argument("--save_storage_interval", type=int, default=50)
    args, others = parser.parse_known_args()
    steps, memory, storage = args.max_steps, args.save_memory_interval, args.save_storage_interval
    intervals = f"--max_steps {steps} --save_memory_interval {memory} --save_storage_interval {storage}"
    options = [*MODEL.split(), *intervals.split(), *others]
    reference, killed = Run(args.out / "uninterrupted", options), Run(args.out / "killed", options)
    begin = time.monotonic()
    try:
        step = step_to_kill(steps, memory, storage)
        with reference.started():
            pass
        with killed.started() as agent:
            kill_one_worker(killed, agent, step)
        good = show(reference, killed, args.out / "loss.png")
    except (DemoError, IncompleteRecordError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print(f"the demo took   {time.monotonic() - begin:.0f} s", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
