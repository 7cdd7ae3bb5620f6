"""Memory that checkpoints take beside the state itself: in each process, shared, and in the page cache."""

import ctypes
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Goal, Values
from benchmarks.harness.page import shown
from benchmarks.harness.turn import Record, Turn, record
from benchmarks.suite._states import tensors
from benchmarks.suite._training import Training
from benchmarks.suite._way import Saving, Way
from benchmarks.suite._ways import WAYS
from benchmarks.suite.saves._memory import Sample, Sampler

if TYPE_CHECKING:
    from benchmarks.harness.results import Run

LATER = 4
LAST = LATER + 3
AFTER = 1.5
"""Seconds after a save that belong to it: fastckpt digests what has been the newest for one."""
PHASES = ("first save", "later saves", "persist", "resume")
SHARED = "shared memory"
PARTS = ("workers", "other processes", SHARED, "page cache")
LARGEST = "largest"
SLOTS = 3


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Record when a phase begins and ends."""
    begin = time.monotonic()
    yield
    record(phase=name, begin=begin, end=time.monotonic(), pid=os.getpid())


def base(size: int) -> None:
    """Set the base: from here on, memory beyond the present one counts. ``size`` is that of this worker's state."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is allocated after
    time.sleep(0.1)
    record(base=time.monotonic(), bytes=size, pid=os.getpid())
    time.sleep(0.1)


def plain(training: Training) -> None:
    """Steps without a save, whose own peak is the base of those with one."""
    with phase("plain"):
        for _ in range(4):
            training.step()
        time.sleep(0.1)


def finish(saving: Saving, training: Training) -> None:
    """Train on until a save is done."""
    training.backward()
    saving.staged()
    training.update()
    if saving.durable is not None:
        saving.durable()
    else:
        time.sleep(AFTER)


def save_and_resume(turn: Turn, name: str) -> None:
    """The worker: saves, a persist, and a kill after another save; then a resume by its successor."""
    warnings.filterwarnings("ignore")
    folder = turn.folder / "checkpoints"
    folder.mkdir(exist_ok=True)
    training = Training(turn.gigabytes)
    training.step()
    size = sum(each.nbytes for each in tensors(training.state()))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        base(size)
        plain(training)
        saves(WAYS[name](training, folder), training)
    way = WAYS[name](training, folder)
    base(size)
    with phase("resume"):
        loaded = way.load(LAST)
        time.sleep(0.1)
        assert sum(each.nbytes for each in loaded) == size
    record(held=size)


def saves(way: Way, training: Training) -> None:
    """All saves of a worker, and its end by SIGKILL."""
    way.ready()
    for step in range(1, LATER + 2):
        with phase("first save" if step == 1 else "later saves"):
            finish(way.save(step), training)
        if step <= LATER:
            way.remove(step)
    place = getattr(way, "place", "")
    if place:
        way.place = "DISK"  # type: ignore[attr-defined]
        with phase("persist"):
            finish(way.save(LATER + 2), training)
        way.place = place  # type: ignore[attr-defined]
    finish(way.save(LAST), training)
    record(killed=time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def sharded(turn: Turn) -> None:
    """A worker of two whose model FSDP2 shards: the same by FsdpShardCheckpointer."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from fastckpt.fsdp import FsdpShardCheckpointer, StorageType

    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    training = Training(turn.gigabytes, around=lambda model: [fully_shard(each) for each in (*model.blocks, model)])
    model = training.model
    parameters = sum(each.to_local().nbytes for each in model.parameters() if isinstance(each, DTensor))
    size = 3 * parameters  # AdamW's state is twice as much
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_first:
        training.step()
        base(size)
        plain(training)
    else:  # scripts resume before the first step: the optimizer has no state, and there are no gradients
        training.optimizer = torch.optim.AdamW(model.parameters())
        model.zero_grad()
    optimizer = training.optimizer
    checkpointer = FsdpShardCheckpointer(turn.folder / "checkpoints")

    def save(step: int, place: StorageType) -> None:
        assert checkpointer.save_checkpoint(step, model=model, optimizer=optimizer, storage_type=place)
        training.step()
        checkpointer.wait_latest_checkpoint()
        time.sleep(AFTER)

    if is_first:
        for step in range(1, LATER + 2):
            with phase("first save" if step == 1 else "later saves"):
                save(step, StorageType.MEMORY)
        with phase("persist"):
            save(LATER + 2, StorageType.DISK)
        save(LAST, StorageType.MEMORY)
        record(killed=time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    base(size)
    with phase("resume"):
        checkpointer.load_checkpoint(model, optimizer)
        time.sleep(0.1)
    record(held=size - parameters)  # the model had its part before
    assert checkpointer.loaded_step == LAST
    checkpointer.close()
    dist.destroy_process_group()


def measure(turn: Turn, *, name: str) -> Values:
    """The peaks of a job, as shares of its state."""
    ours = name.startswith("fastckpt")
    launcher, folder = "fastckpt_run" if ours else "torch.distributed.run", turn.folder / "checkpoints"
    with Sampler(turn.shm, folder) as sampler:
        job = partial(turn.job, options=["--max-restarts=1"], launcher=launcher)
        records = job(sharded, workers=2) if name == FSDP else job(save_and_resume, name)
    found = peaks(records, sampler.samples)
    if ours:
        found[LARGEST] = max(
            value - (SLOTS if key.startswith(SHARED) else 0)
            for key, value in found.items()
            if not key.endswith("plain")
        )
    return found


def peaks(records: Sequence[Record], samples: Sequence[Sample]) -> dict[str, float]:
    """The most of each part in each phase, beyond what there was at the workers' base, in states of all workers.

    A resume begins for its workers with the load, whose result does not count; for the others, with the kill.
    """
    bases: dict[int, Record] = {each["pid"]: each for each in records if "base" in each}
    killed = max(each["killed"] for each in records if "killed" in each)
    state = sum(each["bytes"] for each in bases.values()) / 2  # those before the kill, and those after it
    found: dict[str, float] = {}
    for name in ("plain", *PHASES):
        spans = [each for each in records if each.get("phase") == name]
        if not spans:
            continue
        begin, end = min(each["begin"] for each in spans), max(each["end"] for each in spans)
        resumed = name == "resume"
        start = max(each["base"] for each in bases.values() if (each["base"] > killed) == resumed)
        held = sum(each["held"] for each in records if "held" in each) if resumed else 0
        within = [each for each in samples if begin <= each.at <= end]
        since = [each for each in samples if (killed if resumed else begin) <= each.at <= end]
        first = min(each["base"] for each in bases.values())  # the agent's base, also for what follows the kill
        values = {
            "workers": _more(within, _last(samples, start), lambda pid: pid in bases) - held,
            "other processes": _more(since, _last(samples, first), lambda pid: pid not in bases),
            SHARED: max(each.shared for each in since),
            "page cache": max(each.cached for each in since),
        }
        if name not in ("plain", "resume"):
            values["workers"] -= round(found["workers plain"] * state)
        found |= {f"{part} {name}": value / state for part, value in values.items()}
    return found


def _last(samples: Sequence[Sample], at: float) -> Sample:
    """The last sample before an instant."""
    return max((each for each in samples if each.at <= at), key=lambda each: each.at)


def _more(samples: Sequence[Sample], before: Sample, of: Callable[[int], bool]) -> int:
    """The most private memory of some processes beyond what they had before; of new ones, their share."""

    def more(sample: Sample) -> int:
        known = before.private
        return sum(
            value - known[pid] if pid in known else sample.shares[pid]
            for pid, value in sample.private.items()
            if of(pid)
        )

    return max(more(each) for each in samples)


FSDP = "fastckpt, FSDP2, two workers"
NAMES = {
    "fastckpt": "fastckpt MEMORY",
    "fastckpt, overlapped": "fastckpt MEMORY, overlapped",
    FSDP: FSDP,
    "torch.save": "torch.save",
    "dcp.async_save, thread, cached staging": "dcp.async_save, thread, cached staging",
    "dcp.async_save, process, shared-memory staging": "dcp.async_save, process, shared-memory staging",
}
"""Ways by the names of the table."""


def table(runs: Sequence["Run"]) -> str:
    """A row for each contender of the newest run: the most of each part."""
    run = runs[-1]
    lines = [
        "| multiples of the state | workers, in saves | in a resume | others | shared | page cache |",
        "| --- " * 6 + "|",
    ]
    for name in NAMES:
        cells = [_most(run, name, "workers", PHASES[:-1]), _most(run, name, "workers", PHASES[-1:])]
        cells += [_most(run, name, part, PHASES) for part in PARTS[1:]]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _most(run: "Run", name: str, part: str, phases: Sequence[str]) -> str:
    values = [value for phase in phases for value in run.values(f"{name}.{part} {phase}")]
    return "-" if not values else shown(round(max(values), 3))


FIGURES = [
    Figure(
        f"{name}: the largest of all parts in all phases, without the three slots",
        f"{name}.{LARGEST}",
        goal=Goal("at most", 0.05),
        unit="states",
    )
    for name in NAMES
    if name.startswith("fastckpt")
]


BENCHMARK = Benchmark(
    name="peak_memory",
    question="How much memory do checkpoints take beyond the state itself?",
    work="GPT-2 with AdamW, one worker, or two with FSDP2: saves, a persist, a kill, a resume. In multiples of "
    "its size: private memory of the workers beyond what they had; of agent and template, or of launcher and helpers "
    "(others); shared memory; checkpoint files in the page cache. The goal is at most 0.05 beyond the state and three "
    "slots.",
    contenders=[Contender(name, partial(measure, name=way), quick=name == "fastckpt") for name, way in NAMES.items()],
    figures=FIGURES,
    rounds=1,
    gigabytes=0.5,
    table=table,
)
