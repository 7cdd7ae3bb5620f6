"""Cost of the hooks that see when ranks arrive at collectives, per step, with and without in turns.

    torchrun --nproc-per-node 2 benchmarks/slow_ranks.py [SECONDS]

Prints for each model the median of a step, and the mean of the differences of neighbouring blocks, with an interval of
95 % (1.96 standard errors), of the first rank.
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fastckpt._core.client.heartbeat import Heartbeat
from fastckpt._core.memory.telemetry import Line

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0


def layered(width: int, layers: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """A transformer, and a batch."""
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers), torch.randn(4, 64, width)


def block(model: torch.nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer, steps: int, on: bool) -> float:
    """Seconds per step of a block, after one in which the models are found."""
    beats = Heartbeat(Line(), 0, 0, parts=on)
    start = 0.0
    for step in range(steps + 1):
        if step == 1:
            start = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    took = time.perf_counter() - start
    beats.close()
    return took / steps


def main() -> None:
    """Measure each model for as long."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models = {"one layer": (torch.nn.Linear(16, 16), torch.randn(4, 16), 100), "transformer": (*layered(256, 6), 4)}
    for name, (bare, batch, steps) in models.items():
        model = DistributedDataParallel(bare)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        times: dict[bool, list[float]] = {True: [], False: []}
        go_on, begun = torch.ones(1), time.perf_counter()
        block(model, batch, optimizer, steps, on=True)
        while go_on.item():
            first = len(times[True]) % 2 == 0
            for on in (first, not first):
                times[on].append(block(model, batch, optimizer, steps, on=on))
            go_on.fill_(time.perf_counter() - begun < SECONDS)
            dist.broadcast(go_on, 0)
        differences = [on - off for on, off in zip(times[True], times[False], strict=True)]
        error = 1.96 * statistics.stdev(differences) / len(differences) ** 0.5
        if dist.get_rank() == 0:
            count = sum(1 for _ in bare.parameters())
            print(
                f"{name}, {count} parameters: a step {1e3 * statistics.median(times[False]):.3f} ms, hooks "
                f"{1e6 * statistics.mean(differences):.1f} +- {1e6 * error:.1f} us "
                f"(median {1e6 * statistics.median(differences):.1f}), {len(differences)} pairs of {steps} steps"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
