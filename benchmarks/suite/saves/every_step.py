"""Training that saves to memory at every step, by turns with training that never saves, in one process."""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Goal, Values
from benchmarks.harness.drawing import Drawing
from benchmarks.harness.page import shown
from benchmarks.harness.turn import Turn, record, values_of
from benchmarks.suite._limits import copy, torch_threads, warm_memory
from benchmarks.suite._processes import agent
from benchmarks.suite._states import gpt2, storages

if TYPE_CHECKING:
    from benchmarks.harness.results import Run

BLOCK = 4
"""Steps of one kind in a row."""
TOKENS = 96
"""Tokens of a step for each core that trains: a step is then half a second to a second."""
SETTLE = 1.0
"""Seconds after saves, until the agent has begun to digest the last of them, and a pause in which it ends."""
CORES = os.cpu_count() or 1
PEERS = ("torch.save", "dcp.async_save")
MODES = {"spare": max(1, CORES - 1), "busy": CORES}
"""Threads of torch: all cores but one, and all."""


class Training:
    """A GPT-2 of 12 layers with a fused AdamW, of about that many bytes; a step trains on random tokens."""

    def __init__(self, gigabytes: float) -> None:
        torch.manual_seed(1)
        self.model = gpt2(gigabytes, dropout=0.0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self) -> None:
        """Forward, backward, and the optimizer's step."""
        tokens = torch.randint(50257, (1, TOKENS * torch.get_num_threads() + 1))
        logits = self.model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """Return the state to save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class ThreadCopy:
    """The least that an overlapped save can do: a thread copies all bytes, and the optimizer's step waits for it."""

    def __init__(self, training: Training, targets: Sequence[torch.Tensor]) -> None:
        self._sources, self._targets = storages(training.state()), targets
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        training.optimizer.register_step_pre_hook(lambda *_: self.wait())

    def begin(self) -> None:
        self._pending = self._pool.submit(copy, self._targets, self._sources)

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None


def processor_seconds(pids: Sequence[int]) -> float:
    """Return the processor time of all threads of processes, to the nanosecond."""
    found = 0.0
    for path in (path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")):
        try:
            found += int(path.read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that ends meanwhile
    return found


def launcher() -> list[int]:
    """The agent of this worker, and what it runs beside it."""
    saver = agent()
    return [saver.pid, *(child.pid for child in saver.children(recursive=True) if child.pid != os.getpid())]


def train_by_turns(turn: Turn, steps: int) -> None:
    """The worker: blocks of each kind by turns, first with a core to spare, then with none."""
    from fastckpt import DdpCheckpointer, StorageType

    training = Training(turn.gigabytes)
    training.step()
    with (
        DdpCheckpointer(turn.folder / "checkpoints", overlap=training.optimizer) as checkpointer,
        warm_memory(storages(training.state())) as targets,
    ):
        bare = ThreadCopy(training, targets)
        count = iter(range(1_000_000))

        def save() -> None:
            checkpointer.save_checkpoint(next(count), training.state(), storage_type=StorageType.MEMORY)

        checkpointer.prepare(training.state())
        kinds: dict[str, Callable[[], object]] = {"save": save, "plain": lambda: None, "copy": bare.begin}
        agents = launcher()
        for mode, threads in MODES.items():
            with torch_threads(threads):
                for _ in range(4):  # each slot is used once, and the first save is copied at once
                    save()
                    training.step()
                for _ in range(steps // BLOCK):
                    for kind, begin in kinds.items():
                        block(f"{mode}.{kind}", training, begin, agents)
                        time.sleep(SETTLE if kind == "save" else 0)
        with torch_threads(MODES["spare"]):
            for name, begin in peers(turn, training).items():
                for _ in range(1 if turn.is_quick else 2):
                    block(name, training, begin, agents)
        with torch_threads(1):
            record(copy_processor=[copy_seconds(targets, storages(training.state())) for _ in range(8)])


def peers(turn: Turn, training: Training) -> dict[str, Callable[[], object]]:
    """Saves by others at the same place of a step: each to storage, since neither has memory that outlives it."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo")
    pending: list[Future[Any]] = []

    def async_save() -> None:
        while pending:
            pending.pop().result()  # it refuses a second one before
        saved = dcp.async_save(training.state(), checkpoint_id=turn.folder / "dcp")
        pending.append(saved)  # type: ignore[arg-type]

    return {
        "torch.save": lambda: torch.save(training.state(), turn.folder / "state.pt"),
        "dcp.async_save": async_save,
    }


def block(name: str, training: Training, begin: Callable[[], object], agents: Sequence[int]) -> None:
    """Steps of one kind; each begins with a save, or whatever stands in its place."""
    from fastckpt._core import metrics

    took, stalls, phases = [], [], []
    own, theirs = time.process_time(), processor_seconds(agents)
    for _ in range(BLOCK):
        start = time.perf_counter()
        begin()
        stalls.append(time.perf_counter() - start)
        training.step()
        took.append(time.perf_counter() - start)
        phases.append(dict(metrics.seconds))
    used = {"worker": time.process_time() - own, "agent": processor_seconds(agents) - theirs}
    waits = [each["overlap.wait"] if name.endswith(".save") else 0.0 for each in phases]
    record(block=name, wall=took, call=stalls, wait=waits, **used)


def copy_seconds(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> float:
    """Processor time of a copy by one thread."""
    start = time.thread_time()
    copy(targets, sources)
    return time.thread_time() - start


def measure(turn: Turn) -> Values:
    """All blocks of one job, and what follows from pairs of them."""
    records = turn.job(train_by_turns, 4 if turn.is_quick else 8)
    copies = values_of(records, "copy_processor")
    found: dict[str, list[float]] = {"copy_processor": copies, "two_copies": [2 * statistics.median(copies)]}
    for mode in MODES:
        blocks = {
            kind: [r for r in records if r.get("block") == f"{mode}.{kind}"] for kind in ("save", "plain", "copy")
        }
        for kind, each in blocks.items():
            found[f"{mode}_{kind}"] = values_of(each, "wall")
        plain = blocks["plain"]
        for kind in ("save", "copy"):
            pairs = list(zip(blocks[kind], plain, strict=True))
            longer = statistics.median(found[f"{mode}_{kind}"]) - statistics.median(found[f"{mode}_plain"])
            found[f"{mode}_{kind}_lost"] = [CORES * longer]
            for who in ("worker", "agent"):
                found[f"{mode}_{kind}_{who}"] = [(one[who] - other[who]) / BLOCK for one, other in pairs]
        found[f"{mode}_stall"] = stalls_of(blocks["save"])
    for peer in PEERS:
        found[stall_of(peer)] = stalls_of([r for r in records if r.get("block") == peer])
    return found


def stall_of(peer: str) -> str:
    return f"{peer.replace('.', '_')}_stall"


def stalls_of(blocks: Sequence[dict[str, Any]]) -> list[float]:
    """Return the time that the steps of these blocks have waited, in a call or before the optimizer's step."""
    return [call + wait for each in blocks for call, wait in zip(each["call"], each["wait"], strict=True)]


def stall_per_step(run: "Run") -> Drawing:
    """A line for each way to save: how long each step waits, on a logarithmic scale."""
    drawing = Drawing(880, 330, "How long each step of a training waits for its checkpoint")
    left, right, top, bottom = 70, 700, 40, 290
    drawing.text(20, 22, "ms that a step waits for its checkpoint, with a core to spare", "strong")
    for exponent in range(5):
        y = bottom - (bottom - top) * exponent / 4
        drawing.line([(left, y), (right, y)], "line dashed")
        drawing.text(left - 8, y + 4, f"{10**exponent:,}", "small end")
    quantities = {"fastckpt": "spare_stall"} | {peer: stall_of(peer) for peer in PEERS}
    lowest = top
    # As in the table: medians of rounds, and of these the median.
    medians = {
        name: statistics.median(Figure(name, f"fastckpt.{quantity}").values(run))
        for name, quantity in quantities.items()
    }
    for name in sorted(quantities, key=medians.__getitem__, reverse=True):
        stalls = run.values(f"fastckpt.{quantities[name]}")
        heights = [max(0.0, min(4.0, math.log10(max(1e-6, 1e3 * stall)))) for stall in stalls]
        width = (right - left) / max(1, len(stalls) - 1)
        points = [(left + width * i, bottom - (bottom - top) * height / 4) for i, height in enumerate(heights)]
        drawing.line(
            points, {"spare_stall": "line", stall_of(PEERS[0]): "line dashed"}.get(quantities[name], "line lost")
        )
        lowest = max(lowest + 34, points[-1][1])
        drawing.text(right + 8, lowest, name, "strong")
        place = "memory" if name == "fastckpt" else "storage"
        drawing.text(right + 8, lowest + 16, f"to {place}: {shown(1e3 * medians[name])} ms", "small")
    drawing.text(right, bottom + 22, "steps", "small end")
    return drawing


def lost(mode: str, kind: str = "save") -> str:
    return f"fastckpt.{mode}_{kind}_lost"


BENCHMARK = Benchmark(
    name="every_step",
    question="What does a save to memory at every step cost a job, with a core to spare and with none?",
    work="GPT-2 with a fused AdamW, one worker; saves overlap. Blocks of 4 steps alternate: with saves, without, and "
    "with a bare copy of all bytes by a thread. Core seconds are the added time of a step times the number of "
    "cores; two copies are their processor time. torch.save and dcp.async_save write to storage.",
    contenders=[Contender("fastckpt", measure)],
    rounds=3,
    gigabytes=0.3,
    figures=[
        Figure(
            "step with a save : without, a core to spare",
            "fastckpt.spare_save",
            "fastckpt.spare_plain",
            Goal("at most", 1.01),
        ),
        Figure(
            "step with a bare copy in a thread : without, a core to spare",
            "fastckpt.spare_copy",
            "fastckpt.spare_plain",
        ),
        Figure(
            "core seconds lost by a save : two copies, all busy",
            lost("busy"),
            "fastckpt.two_copies",
            Goal("at most", 1.0),
        ),
        Figure(
            "core seconds lost by a bare copy in a thread : two copies, all busy",
            lost("busy", "copy"),
            "fastckpt.two_copies",
            is_detail=True,
        ),
        Figure("step with a save : without, all busy", "fastckpt.busy_save", "fastckpt.busy_plain"),
        Figure("a step without a save, a core to spare", "fastckpt.spare_plain", unit="ms", scale=1e3, is_detail=True),
        Figure("a step without a save, all busy", "fastckpt.busy_plain", unit="ms", scale=1e3, is_detail=True),
        Figure("two copies, processor time", "fastckpt.two_copies", unit="ms", scale=1e3, is_detail=True),
        Figure(
            "worker per save, processor time, a core to spare",
            "fastckpt.spare_save_worker",
            unit="ms",
            scale=1e3,
            is_detail=True,
        ),
        Figure(
            "the same of a bare copy in a thread", "fastckpt.spare_copy_worker", unit="ms", scale=1e3, is_detail=True
        ),
        Figure("agent per save, processor time", "fastckpt.spare_save_agent", unit="ms", scale=1e3, is_detail=True),
        Figure("a step waits for its save, a core to spare", "fastckpt.spare_stall", unit="ms", scale=1e3),
        Figure("a step waits for its save, all busy", "fastckpt.busy_stall", unit="ms", scale=1e3),
        Figure("a step waits for torch.save", "fastckpt.torch_save_stall", unit="ms", scale=1e3),
        Figure("a step waits for dcp.async_save", "fastckpt.dcp_async_save_stall", unit="ms", scale=1e3),
    ],
    picture=stall_per_step,
)
