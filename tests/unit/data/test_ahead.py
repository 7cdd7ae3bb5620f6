"""A batch that a loop fetches ahead, as in docs/guides/data.md, is used once all the same."""

import re
from pathlib import Path
from typing import Any

import torch

from fastckpt.data import ResumableDataLoader
from fastckpt.ddp import DdpCheckpointer

RECIPE = re.search(
    r"### A batch that is fetched ahead.*?```python\n(.*?)```",
    (Path(__file__).parents[3] / "docs" / "guides" / "data.md").read_text(),
    re.DOTALL,
)


def run(directory: Path, first: int, max_steps: int) -> list[list[float]]:
    """The recipe, from what was saved up to a step; the batches that the weights have learned from."""
    assert RECIPE is not None
    used: list[list[float]] = []
    weights = torch.nn.Linear(1, 1)

    def model(batch: Any) -> Any:
        used.append(batch.flatten().tolist())
        return weights(batch)

    model.state_dict = weights.state_dict  # type: ignore[attr-defined]
    loader = ResumableDataLoader(torch.arange(20.0)[:, None], batch_size=3, shuffle=True)
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
    with DdpCheckpointer(directory) as checkpointer:
        if loaded := checkpointer.load_checkpoint():
            loader.load_state_dict(loaded["data"])
        assert checkpointer.loaded_step == first
        names = {"loader": loader, "model": model, "optimizer": optimizer, "checkpointer": checkpointer}
        exec(RECIPE[1], names | {"step": max(first, 0), "max_steps": max_steps})
    return used


def test_each_prefetched_batch_is_used_once_across_a_resume(tmp_path: Path):
    """Within an epoch, and at its end."""
    loader = ResumableDataLoader(torch.arange(20.0)[:, None], batch_size=3, shuffle=True)
    whole = [batch.flatten().tolist() for _ in range(2) for batch in loader]
    assert [*run(tmp_path, -1, 3), *run(tmp_path, 3, 7), *run(tmp_path, 7, 12)] == whole[:12]


def test_peeking_at_a_batch_warns_once_unless_the_position_is_restored(caplog):
    loader = ResumableDataLoader(list(range(20)), batch_size=3)
    position = loader.state_dict()
    next(iter(loader))
    loader.load_state_dict(position)
    assert len(list(loader)) == 7 and not caplog.text
    for _ in range(3):
        next(iter(loader))
    assert len(list(loader)) == 4
    assert caplog.text.count("took one batch and no more") == 1
