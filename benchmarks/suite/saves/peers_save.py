"""A save of each peer at its best configuration, beside fastckpt's, while training goes on."""

import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import psutil
import torch

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Values
from benchmarks.harness.drawing import Drawing
from benchmarks.harness.turn import Turn, record, values_of
from benchmarks.suite import _peers
from benchmarks.suite._limits import bare_write, seconds, warm_copies
from benchmarks.suite._states import storages, tensors
from benchmarks.suite._training import Training
from benchmarks.suite._way import Saving, Way
from benchmarks.suite._ways import WAYS
from benchmarks.suite.saves._memory import files_of
from benchmarks.suite.saves._ways_table import LIMITS, tabled

if TYPE_CHECKING:
    from benchmarks.harness.results import Run

UNCOUNTED, LATER = 2, 3
"""Saves after the first one, until memory of all slots and stagers was used once; and those that count then."""
AFTER = 1.5
"""Seconds after a save to memory that belong to it: fastckpt digests what has been the newest for one."""
KINDS = ("blocked", "stall", "lost", "durable", "processor")


def processor(root: int) -> float:
    """Seconds of the processor of a process and all that it has started."""
    total = 0.0
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def synced(folder: Path) -> None:
    """Make all of a folder durable."""
    for path in [*files_of(folder), *(Path(root) for root, _, _ in os.walk(folder))]:
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # a name under which something was written, until it had its own
            continue
        os.fsync(fd)
        os.close(fd)


class Bench:
    """Saves of one way, each followed by steps until it is durable."""

    def __init__(self, training: Training, way: Way, root: int) -> None:
        self.training, self.way, self._root = training, way, root
        self._plain = 0.0
        way.ready()

    def warm_up(self, lasting: float) -> None:
        """Steps of which none counts, while memory is prepared; then some that do."""
        end = time.monotonic() + lasting
        while time.monotonic() < end:
            self.training.step()
        found = [seconds(self.training.step) for _ in range(4)]
        self._plain = statistics.median(found)
        record(plain=found)

    def save(self, step: int, after: float = AFTER) -> dict[str, float]:
        """One save: how long it blocked, what it cost the step, and the training until it was durable."""
        training, found = self.training, dict[str, float]()
        used = processor(self._root) - training.busy
        begin = time.perf_counter()
        saving = self.way.save(step)
        blocked = time.perf_counter() - begin
        watcher = Thread(target=self._watch, args=(saving, begin, found, after))
        watcher.start()
        training.backward()
        wait = seconds(saving.staged)
        training.update()
        found["blocked"] = blocked + wait + training.waited
        found["stall"] = time.perf_counter() - begin - self._plain
        steps = 1
        while watcher.is_alive():
            training.step()
            steps += 1
        watcher.join()
        if saving.durable is not None and "durable" not in found:
            raise RuntimeError(f"save {step} did not become durable: see above")
        found["lost"] = time.perf_counter() - begin - steps * self._plain
        found["processor"] = processor(self._root) - training.busy - used
        return found

    def _watch(self, saving: Saving, begin: float, found: dict[str, float], after: float) -> None:
        """Note when a save is durable; files are synced here if its way does not do so."""
        if saving.durable is None:
            time.sleep(after)
            return
        saving.durable()
        synced(self.way.folder)
        found["durable"] = time.perf_counter() - begin

    def check(self, step: int) -> dict[str, float]:
        """One save after which the state is changed at once: whether what is loaded is the state as it was."""
        want = [each.clone() for each in tensors(self.training.state())]
        found = self.save(step)
        if all(torch.equal(a, b) for a, b in zip(want, tensors(self.training.state()), strict=True)):
            raise AssertionError("training did not change the state")
        loaded = self.way.load(step)
        same = len(loaded) == len(want) and all(torch.equal(a, b) for a, b in zip(want, loaded, strict=True))
        return found | {"consistent": float(same)}


def save_beside_training(turn: Turn, name: str, root: int) -> None:
    """The worker: a first save, later ones, and one that is checked."""
    warnings.filterwarnings("ignore")
    folder = turn.folder / "checkpoints"
    folder.mkdir()
    training = Training(turn.gigabytes)
    bench = Bench(training, WAYS[name](training, folder), root)
    bench.warm_up(1 + turn.gigabytes)
    last = 1 + UNCOUNTED + LATER
    for step in range(1, last + 1):
        counts = step == 1 or step > 1 + UNCOUNTED
        found = bench.check(step) if step == last else bench.save(step, AFTER if counts else 0.0)
        if counts:
            record(**{f"first {key}" if step == 1 else key: value for key, value in found.items()})
        bench.way.remove(step)
    bench.way.close()


def measure(turn: Turn, *, name: str, launcher: str | Sequence[str]) -> Values:
    """A job of one worker that saves in one way."""
    with _peers.cleared_up():
        records = turn.job(save_beside_training, name, os.getpid(), launcher=launcher)
    keys = ["plain", "consistent", *KINDS, *(f"first {kind}" for kind in KINDS)]
    return {key: values for key in keys if (values := values_of(records, key))}


def limits(turn: Turn) -> Values:
    """The copy of the state into warm shared memory, and the write of as many bytes."""
    sources = storages(Training(turn.gigabytes).state())
    image = turn.shm / "image"
    with image.open("wb") as file:
        for source in sources:
            file.write(source.numpy())
        file.truncate(-(-file.tell() // 4096) * 4096)  # O_DIRECT writes whole blocks
    writes = [bare_write(image, turn.folder / "bare") for _ in range(LATER)]
    image.unlink()
    return {"copy": warm_copies(sources, 2 * LATER), "write": writes, "bytes": float(sum(s.numel() for s in sources))}


def contender(name: str, *, peer: str = "") -> Contender:
    """A way of `WAYS`, in the environment of a peer if it needs one."""
    module = "benchmarks.suite.saves._dlrover_run" if peer == "dlrover" else "torch.distributed.run"
    launcher: str | Sequence[str] = _peers.launcher(peer, module) if peer else module
    if name.startswith("fastckpt"):
        launcher = "fastckpt_run"
    missing: Callable[[], str] = str
    if peer:
        missing = partial(_peers.missing, peer, name if peer == "nvrx" else "")
    return Contender(name, partial(measure, name=name, launcher=launcher), missing, name in QUICK)


PEERS = {"torchsnapshot": "torchsnapshot", "DLRover": "dlrover", "nvidia": "nvrx", "Orbax": "orbax"}
QUICK = {"fastckpt MEMORY, overlapped", "torch.save", "dcp.async_save, process, shared-memory staging"}
CONTENDERS = [
    Contender(LIMITS, limits),
    *(
        contender(name, peer=next((peer for begin, peer in PEERS.items() if name.startswith(begin)), ""))
        for name in WAYS
    ),
]


def table(runs: Sequence["Run"]) -> str:
    """The ways, and those that were not consistent."""
    newest = runs[-2:]
    verdicts = [(name, value) for run in newest for name in WAYS for value in run.values(f"{name}.consistent")]
    torn = dict.fromkeys(name for name, value in verdicts if not value)
    what = (
        f"Not consistent: {', '.join(torn)}."
        if torn
        else "All are consistent: what is loaded is the state bit for bit."
    )
    return f"{tabled(runs, WAYS)}\n\n{what}"


def picture(run: "Run") -> Drawing:
    """A bar for each way: by how much a step with a save is longer, on a logarithmic scale."""
    found = {name: run.values(f"{name}.stall") for name in WAYS if run.values(f"{name}.stall")}
    left, top, row, width = 360, 60, 26, 420
    drawing = Drawing(left + width + 110, top + row * len(found) + 40, "stall of a step by a save")
    plain = statistics.median(v for name in found for v in run.values(f"{name}.plain"))
    drawing.text(
        16, 26, f"stall of a step by a save, ms: {run.gigabytes:g} GB, steps of {1000 * plain:.0f} ms", "strong"
    )
    low, high = 1.0, 10 ** math.ceil(math.log10(max(2.0, 1000 * max(statistics.median(v) for v in found.values()))))

    def place(value: float) -> float:
        return left + width * math.log10(max(value, low) / low) / math.log10(high / low)

    for power in range(round(math.log10(high)) + 1):
        x = place(10**power)
        drawing.line([(x, top - 8), (x, top + row * len(found))], "line dashed")
        drawing.text(x, top - 14, f"{10**power:,}", "small middle")
    for index, (name, values) in enumerate(found.items()):
        y, value = top + row * index, 1000 * statistics.median(values)
        drawing.text(left - 10, y + 16, name, "end strong" if name.startswith("fastckpt") else "end")
        kind = "memory" if name.startswith("fastckpt") else "pause"
        drawing.box(left, y + 3, place(value) - left, row - 8, kind)
        drawing.text(place(value) + 8, y + 16, f"{value:,.0f}", "small")
    return drawing


BENCHMARK = Benchmark(
    name="peers_save",
    question="What does a save cost a job, with each peer at its best configuration?",
    work="GPT-2 with AdamW, one worker on one core, another core is free. Blocked: training waits, in the save or "
    "before the optimizer's step. Durable: until all that it wrote is synced. Two runs, the newest first; without "
    "first saves.",
    contenders=CONTENDERS,
    figures=[
        figure
        for name in WAYS
        for figure in (Figure(f"{name}: blocked", f"{name}.blocked"), Figure(f"{name}: durable", f"{name}.durable"))
    ],
    rounds=1,
    gigabytes=0.5,
    picture=picture,
    table=table,
)
