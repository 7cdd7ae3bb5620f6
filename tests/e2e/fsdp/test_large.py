"""Shards of more than 2 GiB: lengths and places do not fit 32 bits."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fastckpt.fsdp import FsdpShardCheckpointer, StorageType

SIZE = (1 << 31) + 4097


def pattern(seed: int) -> torch.Tensor:
    """Bytes of which no two MiB are alike."""
    tensor = torch.arange(SIZE // 8 + 1, dtype=torch.int64).mul_(2654435761).add_(seed).view(torch.uint8)[:SIZE]
    assert tensor.nbytes > 1 << 31
    return tensor


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_tensor_beyond_2_gib_comes_back_from_memory_and_storage(tmp_path: Path):
    need = 6 * SIZE
    for place in ("/dev/shm", tmp_path):
        free = shutil.disk_usage(place).free
        assert free > need, f"{place} has {free / 1e9:.1f} GB free; {need / 1e9:.1f} are needed"
    state = {"before": torch.ones(3), "large": pattern(1), "within": torch.tensor(7)}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def came_back() -> bool:
        whole = all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
        for tensor in loaded.values():
            tensor.zero_()
        return whole

    with FsdpShardCheckpointer(tmp_path / "run") as checkpointer:
        for step, place in ((1, StorageType.MEMORY), (2, StorageType.DISK)):
            assert checkpointer.save_checkpoint(step, state, storage_type=place)
            dcp.load(loaded, storage_reader=checkpointer.get_storage_reader())
            assert came_back() and (checkpointer.loaded_step, checkpointer.loaded_from) == (step, "memory")
    with FsdpShardCheckpointer(tmp_path / "run") as checkpointer:
        dcp.load(loaded, storage_reader=checkpointer.get_storage_reader())
        assert came_back() and (checkpointer.loaded_step, checkpointer.loaded_from) == (2, "storage")
    dcp.load(loaded, checkpoint_id=tmp_path / "run" / "checkpoint-2")
    assert came_back(), "by stock DCP"
