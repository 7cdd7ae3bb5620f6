"""Reads checkpoints with torch alone, in a process that does not know fastckpt."""

import pickle
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.e2e.dcp.states import same, zeros

folder = Path(sys.argv[1])
for place in folder.glob("checkpoints/checkpoint-*"):
    want = torch.load(folder / f"full.{place.name.removeprefix('checkpoint-')}")
    dcp_to_torch_save(place, folder / "converted")
    assert same(torch.load(folder / "converted", weights_only=False)["app"], want), f"{place} converted otherwise"
    state = {"app": zeros(want)}
    dcp.load(state, checkpoint_id=place)
    assert same(state["app"], want), f"{place} loaded otherwise"
    entries = pickle.loads((place / ".metadata").read_bytes()).storage_data
    copies = [index for index in entries if index.fqn == "app.table"]
    print(place.name, len({entry.relative_path for entry in entries.values()}), "files,", len(copies), "table")
assert not [name for name in sys.modules if name.startswith("fastckpt")]
