"""Shards of more than 2 GiB: lengths and places do not fit 32 bits."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fastckpt.fsdp import FsdpShardCheckpointer, StorageType

SIZE = (1 << 31) + 4097


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_tensor_beyond_2_gib_comes_back_from_memory_and_storage(tmp_path: Path):
    assert min(shutil.disk_usage(place).free for place in ("/dev/shm", tmp_path)) > 6 * SIZE, "too little room"
    # no two MiB are alike
    large = torch.arange(SIZE // 8 + 1, dtype=torch.int64).mul_(2654435761).view(torch.uint8)[:SIZE]
    state = {"before": torch.ones(3), "large": large, "within": torch.tensor(7)}

    def came_back(**source: Any) -> bool:
        loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load(loaded, **source)
        return all(torch.equal(loaded[name], tensor) for name, tensor in state.items())

    for tier in ("memory", "storage"):
        with FsdpShardCheckpointer(tmp_path / "run") as checkpointer:
            if tier == "memory":
                assert checkpointer.save_checkpoint(1, state, storage_type=StorageType.DISK)
            assert came_back(storage_reader=checkpointer.get_storage_reader()) and checkpointer.loaded_from == tier
    assert came_back(checkpoint_id=tmp_path / "run" / "checkpoint-1"), "by stock DCP"
