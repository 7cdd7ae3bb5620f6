"""The training that benchmarks/watch.py watches: a model in DistributedDataParallel, saved into memory every step.

Rank 0 writes the seconds of each step, and what processor time its process took for all of them, to ``--out``.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastckpt
from fastckpt import Checkpointer

WARM = 50
"""Steps before those that count."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(*(layer for _ in range(args.layers) for layer in (nn.Linear(args.width, args.width), nn.ReLU())))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(16, args.width)
    times, cpu = list[float](), 0.0
    directory = args.out / "checkpoints"
    every = {"memory": 50, "storage": 10**6}
    with Checkpointer(directory, model=model, optimizer=optimizer, every=every) as checkpointer:
        checkpointer.resume()
        for step in range(1, args.steps + WARM + 1):
            if step == WARM:
                cpu = time.process_time()
            begin = time.perf_counter()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if hasattr(fastckpt.metrics, "log"):
                fastckpt.metrics.log(step, {"loss": float(loss.detach())})
            checkpointer.step(step)
            times.append(time.perf_counter() - begin)
        cpu = time.process_time() - cpu
    if dist.get_rank() == 0:
        (args.out / "times.json").write_text(json.dumps({"steps": times[WARM:], "cpu": cpu}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
