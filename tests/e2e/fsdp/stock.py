"""Loads checkpoints with torch alone, in a process that does not know fastckpt, and compares them with full states."""

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.e2e.dcp.states import same, zeros

folder = Path(sys.argv[1])
for place in sorted(folder.glob("checkpoints/checkpoint-*")):
    step = int(place.name.removeprefix("checkpoint-"))
    full = torch.load(folder / f"full.{step}")
    want = {name: full[name] for name in ("model", "optimizer")}
    state = zeros(want) | {"table": torch.zeros(100), "step": 0}
    dcp.load(state, checkpoint_id=place)
    assert state.pop("step") == step
    assert bool((state.pop("table") == step * (step + 1) / 2).all())
    assert same(state, want), f"{place} loaded otherwise"
    dcp_to_torch_save(place, folder / "converted")
    converted = torch.load(folder / "converted", weights_only=False)
    assert same({name: converted[name] for name in want}, want), f"{place} converted otherwise"
    print(step, *sorted(path.name for path in place.iterdir()))
assert not [name for name in sys.modules if name.startswith("fastckpt")]
