"""`prepare`: predicts the images of the first save and maps them before it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt import DdpCheckpointer, StorageType
from tests.e2e.ddp import conftest

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def until(condition: Callable[[], bool]) -> None:
    conftest.until(condition, "the mapping of all images")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_save_after_prepare_finds_its_images_mapped(tmp_path: Path, name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 3))
    model[0].bias.requires_grad_(False)
    optimizer = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}

    with DdpCheckpointer(tmp_path) as checkpointer:
        checkpointer.prepare(state(), optimizer)
        images = checkpointer._writer._snapshots._images._images
        until(lambda: len(images) == 6)  # of model and rank, in three slots
        before = {path: image._inode for path, image in images.items()}
        model(torch.randn(4, 300)).sum().backward()
        optimizer.step()
        for step in range(3):
            assert checkpointer.save_checkpoint(step, state(), storage_type=StorageType.MEMORY)
        assert {path: image._inode for path, image in images.items()} == before
        assert checkpointer.load_checkpoint().keys() == state().keys()
