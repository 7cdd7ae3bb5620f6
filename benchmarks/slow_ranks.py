"""Cost of the hooks that see when ranks arrive at collectives, per step, with and without in turns.

    torchrun --nproc-per-node 2 benchmarks/slow_ranks.py [SECONDS]

Prints for each model the median of a step, and what the hooks add to it: the median of the differences of neighbouring
blocks, with its interval of 95 % by order statistics, of the first rank. Processor time is that of the thread that
trains; wall time has the other rank's noise in it, too.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from examples.gpt2.model import GPT, GPTConfig
from fastckpt._core.client.heartbeat import Heartbeat
from fastckpt._core.memory.telemetry import Line

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0


class Cost(NamedTuple):
    """Seconds per step: of the clock on the wall, and of the processor in this thread."""

    wall: float
    thread: float


def gpt2() -> tuple[torch.nn.Module, torch.Tensor]:
    """The model of the example, a small one of 4 layers, and a batch."""
    model = GPT(GPTConfig(block_size=64, n_layer=4, n_head=4, n_embd=128, dropout=0.0))
    return model, torch.randint(256, (8, 64))


def block(model: torch.nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer, steps: int, on: bool) -> Cost:
    """Cost of a step in a block, after one in which the models are found."""
    beats = Heartbeat(Line(), 0, 0, parts=on)
    wall = thread = 0.0
    for step in range(steps + 1):
        if step == 1:
            wall, thread = time.perf_counter(), time.thread_time()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    cost = Cost((time.perf_counter() - wall) / steps, (time.thread_time() - thread) / steps)
    beats.close()
    return cost


def difference(on: Sequence[float], off: Sequence[float]) -> str:
    """The median of the differences in microseconds, with its interval of 95 %, and as a share of a step."""
    differences = sorted(1e6 * (with_ - without) for with_, without in zip(on, off, strict=True))
    middle, half = len(differences) / 2, 0.98 * len(differences) ** 0.5
    low, high = differences[max(0, int(middle - half))], differences[min(len(differences) - 1, int(middle + half))]
    median, step = statistics.median(differences), 1e6 * statistics.median(off)
    return f"{median:.1f} us [{low:.1f}, {high:.1f}] = {median / step:.2%} of {step / 1e3:.3f} ms"


def main() -> None:
    """Measure each model for as long."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models = {"one layer": (torch.nn.Linear(16, 16), torch.randn(4, 16), 40), "GPT-2": (*gpt2(), 3)}
    for name, (bare, batch, steps) in models.items():
        model = DistributedDataParallel(bare)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        times: dict[bool, list[Cost]] = {True: [], False: []}
        go_on, begun = torch.ones(1), time.perf_counter()
        block(model, batch, optimizer, steps, on=True)
        while go_on.item():
            first = len(times[True]) % 2 == 0
            for on in (first, not first):
                times[on].append(block(model, batch, optimizer, steps, on=on))
            go_on.fill_(time.perf_counter() - begun < SECONDS)
            dist.broadcast(go_on, 0)
        if dist.get_rank() == 0:
            print(f"{name}, {sum(1 for _ in bare.parameters())} parameters, {len(times[True])} pairs of {steps} steps")
            for kind in Cost._fields:
                on_off = ([getattr(cost, kind) for cost in times[on]] for on in (True, False))
                print(f"  {kind}: {difference(*on_off)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
