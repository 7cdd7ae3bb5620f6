"""Measures the cost of a persist for training that keeps every core busy: steps that are not done meanwhile.

    python benchmarks/persist_cost.py [--gigabytes 3] [--repeats 7] [--folder .]

One process a core trains a small GPT without pause; another one, as the agent does, writes a checkpoint from shared
memory to storage, by each way in turn. What a way costs is the time in which all processes together would have made
the steps that they did not make, by their pace just before and just after. Nothing at all is one of the ways: what it
seems to cost is the error of the others.
"""

import argparse
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

BLOCK = 32 << 20
CAPACITY = 1 << 20
"""Steps that a log has room for: hours."""
TAIL = 0.3
"""Seconds after a persist in which the training may still feel it."""
SETTLE = 1.0
"""Seconds for which nothing happens after files have been removed."""
PACE = 1.5
"""Seconds over which the pace of the training is taken, before and after."""


class Log:
    """Times at which one training process finished each step: a count and that many times, in shared memory."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(8 * (CAPACITY + 1))
            self._cells = memoryview(mmap.mmap(file.fileno(), 8 * (CAPACITY + 1))).cast("d")

    def add(self) -> None:
        """A step is done."""
        count = int(self._cells[0]) + 1
        self._cells[count] = time.monotonic()
        self._cells[0] = count

    def steps(self, start: float, end: float) -> float:
        """Return the number of steps between two times, with fractions; a later step must be done already."""
        return self._at(end) - self._at(start)

    def _at(self, when: float) -> float:
        low, high = 1, int(self._cells[0])
        if not self._cells[low] <= when <= self._cells[high]:
            raise RuntimeError("the training was not running at that time")
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._cells[middle] <= when else (low, middle)
        return low + (when - self._cells[low]) / (self._cells[high] - self._cells[low])

    def wait_beyond(self, when: float) -> None:
        """Return when a step has been done after that time; raises TimeoutError if none is for a minute."""
        deadline = time.monotonic() + 60
        while not self._cells[0] or self._cells[int(self._cells[0])] <= when:
            if time.monotonic() > deadline:
                raise TimeoutError("the training makes no steps")
            time.sleep(0.02)


def train(log: Log) -> None:
    """Take steps for as long as the benchmark runs."""
    from examples.gpt2.model import GPT, GPTConfig

    torch.set_num_threads(1)
    model = GPT(GPTConfig(vocab_size=512, n_layer=3, n_head=4, n_embd=128, block_size=64))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 512, (4, 65))
    parent = os.getppid()
    while os.getppid() == parent:
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        log.add()


def ours(image: Path, folder: Path) -> None:
    """The way of every persist of ours, with manifest, renames and tracker."""
    from fastckpt._core.format.ids import SaveId
    from fastckpt._core.storage.image_source import PublishRequest
    from fastckpt._core.storage.local.directory import CheckpointDirectory

    CheckpointDirectory(folder).publish(PublishRequest(SaveId(0, 1), {"model.pt": image}))


def buffered(image: Path, folder: Path) -> None:
    """Plain writes through the page cache from the same memory, and fsync."""
    folder.mkdir()
    size = image.stat().st_size
    with image.open("rb") as source, (folder / "model.pt").open("wb", buffering=0) as target:
        memory = memoryview(mmap.mmap(source.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ))
        for offset in range(0, size, BLOCK):
            target.write(memory[offset : offset + BLOCK])
        os.fsync(target.fileno())


_state: dict[str, torch.Tensor] = {}


def torch_save(image: Path, folder: Path) -> None:
    """torch.save of a state that this process holds, and fsync, as background processes of other tools do."""
    folder.mkdir()
    with (folder / "model.pt").open("wb") as target:
        torch.save(_state, target)
        target.flush()
        os.fsync(target.fileno())


def nothing(image: Path, folder: Path) -> None:
    """Persist nothing, for about as long as a persist takes."""
    time.sleep(image.stat().st_size / 2e9)


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "ours": ours,
    "buffered write": buffered,
    "torch.save": torch_save,
    "nothing": nothing,
}


def persist(image: Path, folder: Path) -> None:
    """Do as lines of standard input say, and tell when it began and ended and what this process used for it."""
    torch.set_num_threads(1)
    size = image.stat().st_size
    _state.update((str(i), torch.full((size // 400,), float(i))) for i in range(100))  # 100 tensors of float32
    for line in sys.stdin:
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        WAYS[line.strip()](image, folder)
        end, after = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        print(json.dumps([start, end, used]), flush=True)


@dataclass(frozen=True)
class Trial:
    """One persist: seconds it took, seconds of all processes lost, of how many, and of processor time used."""

    took: float
    lost: float
    watched: float
    used: float


def measure(way: str, writer: "subprocess.Popen[str]", logs: list[Log], folder: Path) -> Trial:
    assert writer.stdin and writer.stdout
    time.sleep(PACE)
    writer.stdin.write(way + "\n")
    writer.stdin.flush()
    start, end, used = json.loads(writer.stdout.readline())
    watched = end + TAIL - start
    time.sleep(TAIL)
    shutil.rmtree(folder, ignore_errors=True)
    time.sleep(SETTLE)
    quiet = time.monotonic()
    time.sleep(PACE)
    for log in logs:
        log.wait_beyond(quiet + PACE)
    lost = 0.0
    for log in logs:
        pace = (log.steps(start - PACE, start) + log.steps(quiet, quiet + PACE)) / (2 * PACE)
        lost += watched - log.steps(start, end + TAIL) / pace
    return Trial(end - start, lost, watched * len(logs), used)


@contextmanager
def child(*arguments: object) -> Iterator["subprocess.Popen[str]"]:
    """This script as another process, which does not outlive the block."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, __file__, *map(str, arguments)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def make_image(path: Path, size: int) -> None:
    """A file in shared memory that is reserved and filled, as a slot's is."""
    from fastckpt._core.memory.pages import allocate

    with path.open("w+b", buffering=0) as file:
        allocate(file.fileno(), size)
        block = os.urandom(BLOCK)
        for _ in range(size // BLOCK):
            file.write(block)


def run(options: argparse.Namespace) -> dict[str, list[Trial]]:
    size = round(options.gigabytes * 1e9) // BLOCK * BLOCK
    with ExitStack() as stack:
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="fastckpt-bench-")))
        storage = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-")))
        make_image(memory / "model.pt", size)
        writer = stack.enter_context(child("--worker", "persist", memory / "model.pt", storage / "checkpoints"))
        logs = [Log(memory / f"log-{i}") for i in range(options.processes)]
        for i in range(options.processes):
            stack.enter_context(child("--worker", "train", memory / f"log-{i}"))
        for log in logs:
            log.wait_beyond(0)
        for way in WAYS:  # once to warm up
            measure(way, writer, logs, storage / "checkpoints")
        trials: dict[str, list[Trial]] = {way: [] for way in WAYS}
        for _ in range(options.repeats):
            for way, done in trials.items():
                done.append(measure(way, writer, logs, storage / "checkpoints"))
        return trials


def report(trials: dict[str, list[Trial]], options: argparse.Namespace) -> None:
    gigabytes = round(options.gigabytes * 1e9) // BLOCK * BLOCK / 1e9
    print(f"{gigabytes:.2f} GB beside {options.processes} busy processes on {os.cpu_count()} cores; "
          f"medians (ranges) of {options.repeats}; goal: at most 0.1 s of the training's time per GB\n")  # fmt: skip
    print("| way | seconds | training lost, s per GB: all processes together | each | steps slower meanwhile "
          "| processor time of the writer, s per GB |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- |")
    for way, done in trials.items():
        lost = [trial.lost / gigabytes for trial in done]
        slower = [100 * trial.lost / (trial.watched - trial.lost) for trial in done]
        print(f"| {way} | {figures([t.took for t in done])} | **{figures(lost)}** "
              f"| {figures([each / options.processes for each in lost])} | {statistics.median(slower):.0f}% "
              f"| {figures([t.used / gigabytes for t in done])} |", flush=True)  # fmt: skip


def figures(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="busy ones; default: one a core")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the storage to write to")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    match options.worker:
        case None:
            report(run(options), options)
        case ["train", log]:
            train(Log(Path(log)))
        case ["persist", image, folder]:
            persist(Path(image), Path(folder))


if __name__ == "__main__":
    main()
