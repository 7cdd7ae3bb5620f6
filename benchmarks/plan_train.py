"""The training of benchmarks/plan.py: DDP, FSDP2, or DDP with a table that gains rows at each step."""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fastckpt import Checkpointer

WIDTH = 512


class Table:
    """Rows that are added as new keys come, as in a recommender's embedding."""

    def __init__(self, rows: int) -> None:
        self.rows = torch.randn(rows, 64)

    def grow(self, rows: int) -> None:
        self.rows = torch.cat([self.rows, torch.randn(rows, 64)])

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("ddp", "fsdp", "table"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, required=True, help="of parameters and states of AdamW")
    parser.add_argument("--step-seconds", type=float, required=True, help="a step waits until then, as for a device")
    parser.add_argument("--rows", type=int, default=400, help="that each step adds to the table")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = max(1, round(args.megabytes * 1e6 / (12 * WIDTH * WIDTH)))
    model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    if args.kind == "fsdp":
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    table = Table(20_000)
    grows = args.kind == "table"
    others = {"table": table} if grows else {}
    checkpointer = Checkpointer(args.out, model=model, optimizer=optimizer, others=others)
    step = checkpointer.resume()
    while True:
        begun = time.monotonic()
        model(torch.ones(4, WIDTH)).square().sum().backward()
        if grows:
            table.grow(args.rows)
        time.sleep(max(0.0, begun + args.step_seconds - time.monotonic()))
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        checkpointer.step(step)


if __name__ == "__main__":
    main()
