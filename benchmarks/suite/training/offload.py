"""Activations on disk beside checkpointing: seconds of a step, memory, and the largest batch."""

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Goal, Values
from benchmarks.harness.turn import Turn

LENGTH, BATCH = 256, 8
ROOM = 150 << 20
"""Bytes of activations that a batch may take."""
BUDGET = ROOM // 10
MAPPED = 1 << 20
"""Threshold of glibc that ActivationOffload sets: no way has an advantage by it."""
STEPS = 3


class Checkpointed(nn.Module):
    """A block that is computed again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._block = block

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self._block, x, use_reentrant=False)


class Training:
    """A GPT-2 of 8 layers, on the accelerator if there is one, and the way in which its activations are kept."""

    def __init__(self, way: str, folder: Path) -> None:
        from examples.gpt2.model import GPT, GPTConfig
        from fastckpt.offload import ActivationOffload

        torch.manual_seed(0)
        ctypes.CDLL(None).mallopt(-3, MAPPED)
        self.device = torch.accelerator.current_accelerator() or torch.device("cpu")
        shape = {"n_layer": 8, "n_embd": 512, "n_head": 8, "block_size": LENGTH}
        self.model = GPT(GPTConfig(dropout=0.0, **shape)).to(self.device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        if way in ("checkpointing", "both"):
            self.model.blocks = nn.ModuleList(map(Checkpointed, self.model.blocks))
        self._around: Any = contextlib.nullcontext()
        if way in ("offload", "both"):
            self._around = ActivationOffload(folder, budget=BUDGET)

    def step(self, batch: int) -> None:
        """One step; gradients stay allocated: they are a part of the resident state."""
        tokens = torch.randint(0, 256, (batch, LENGTH), device=self.device)
        with self._around:
            logits = self.model(tokens)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def memory(self, work: Callable[[], object]) -> int:
        """Bytes that some work takes at most, beyond what is resident."""
        with self._around:
            pass  # the begin of a forward gives back what the last backward has read into
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()
            resident = torch.accelerator.memory_allocated()
            work()
            return torch.accelerator.max_memory_allocated() - resident
        Path("/proc/self/clear_refs").write_text("5")
        resident = of_status("VmRSS")
        work()
        return of_status("VmHWM") - resident


def of_status(name: str) -> int:
    """A number of kB in /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(way: str, turn: Turn) -> Values:
    """Steps at one batch, their memory, and the largest batch whose activations fit, to an eighth."""
    training = Training(way, turn.folder)
    rates: dict[int, float] = {}

    def timed(batch: int) -> float:
        begin = time.perf_counter()
        training.step(batch)
        return time.perf_counter() - begin

    def fits(batch: int) -> bool:
        training.step(batch)
        taken = training.memory(lambda: rates.update({batch: batch / timed(batch)}))
        return taken <= ROOM

    for _ in range(2):
        training.step(BATCH)
    memory = training.memory(partial(training.step, BATCH))
    steps = [timed(BATCH) for _ in range(STEPS)]
    gradients = sum(float(each.detach().double().abs().sum()) for each in training.model.parameters())
    found = {"step": steps, "memory": float(memory), "weights": gradients}
    if turn.is_quick:
        return found
    best = largest(fits)
    return found | {"batch": float(best), "rate": rates[best]}


def largest(fits: Callable[[int], bool]) -> int:
    """The largest batch that fits, to an eighth."""
    low, high = 1, BATCH
    while fits(high):
        low, high = high, high * 2
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


NONE, OFFLOAD, CHECKPOINTING = "none", "offload", "checkpointing"
WAYS = (NONE, CHECKPOINTING, OFFLOAD, "both")
GOALS = {OFFLOAD: (Goal("at most", 1.1), Goal("at most", 0.2), Goal("at least", 5))}


def figures(way: str) -> list[Figure]:
    """Rows of a way beside none."""
    step, memory, batch = GOALS.get(way, (None, None, None))
    return [
        Figure(f"{way}: step", f"{way}.step", f"{NONE}.step", step),
        Figure(f"{way}: memory", f"{way}.memory", f"{NONE}.memory", memory),
        Figure(f"{way}: largest batch", f"{way}.batch", f"{NONE}.batch", batch),
        Figure(f"{way}: samples/s at that batch", f"{way}.rate", f"{NONE}.rate"),
        Figure(f"{way}: sum of the weights, 1 if equal", f"{way}.weights", f"{NONE}.weights", is_detail=True),
    ]


BENCHMARK = Benchmark(
    name="offload",
    question="What do activations on disk cost and save?",
    work="GPT-2 of 8 layers; largest batch: with 150 MiB of activations. Ratios to a step that keeps all.",
    contenders=[Contender(way, partial(measure, way)) for way in WAYS],
    figures=[
        *(figure for way in WAYS[1:] for figure in figures(way)),
        Figure("largest batch, offload : checkpointing", "offload.batch", "checkpointing.batch", Goal("at least", 1.5)),
        Figure("samples/s there", "offload.rate", "checkpointing.rate", Goal("at least", 1.15)),
    ],
    gigabytes=0.0,
)
