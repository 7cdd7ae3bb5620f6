"""Train twice, the second time with a worker killed midway, and show that the training did not notice."""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL

import psutil

from examples.gpt2.afterwards import file_of_torch, go_on, weights_equal
from examples.gpt2.picture import draw
from examples.gpt2.report import Comparison, Event, Failure, IncompleteRecordError, describe, read_lines
from examples.gpt2.run import TIMEOUT, DemoError, Run
from fastckpt import metrics

MODEL = "--n_layer 4 --n_head 4 --n_embd 128 --block_size 128 --batch_size 8 --lr 2e-3 --device cpu"
FURTHER = 20
"""Steps that another number of workers does in the end."""


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


def show(reference: Run, killed: Run, picture: Path) -> bool:
    """Print the report, draw the picture, and tell whether training came back from memory unchanged."""
    failure = Failure.from_events(read_lines(killed.events))
    expected, found = read_lines(reference.losses), read_lines(killed.losses)
    losses, weights = Comparison.of(expected, found), weights_equal(reference.weights, killed.weights)
    draw(picture, failure, expected, found)
    print(f"\n{describe(failure, losses, weights)}\npicture         {picture}", flush=True)
    return failure.tier == "memory" and losses.equal == losses.steps and weights


def show_afterwards(run: Run) -> bool:
    """Print what the last checkpoint is good for, and tell whether stock tools read the trained weights from it."""
    equal = weights_equal(file_of_torch(run), run.weights)
    further = go_on(run, FURTHER)
    print(f"\nread by torch   {'the trained weights, bit for bit' if equal else 'DIFFERS from the trained weights'}")
    print(f"one worker      {further}", flush=True)
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Other options go to the script.")
    parser.add_argument("script", type=Path, help="examples/ddp_gpt2/train.py, or another of its kind")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for what the demo makes")
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument("--save_memory_interval", type=int, default=5)
    parser.add_argument("--save_storage_interval", type=int, default=50)
    args, others = parser.parse_known_args()
    steps, memory, storage = args.max_steps, args.save_memory_interval, args.save_storage_interval
    intervals = f"--save_memory_interval {memory} --save_storage_interval {storage}"
    options = [*MODEL.split(), *intervals.split(), *others]
    reference, killed = (Run(args.out / name, args.script, options, steps) for name in ("uninterrupted", "killed"))
    begin = time.monotonic()
    try:
        step = step_to_kill(steps, memory, storage)
        reference.clear()
        with reference.started():
            pass
        killed.clear()
        with killed.started() as agent:
            kill_one_worker(killed, agent, step)
        good = show(reference, killed, args.out / "loss.png") and show_afterwards(killed)
    except (DemoError, IncompleteRecordError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print(f"the demo took   {time.monotonic() - begin:.0f} s", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
