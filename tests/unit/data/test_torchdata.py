"""torchdata's StatefulDataLoader, saved and loaded as a checkpointer does: resumes, and refusals."""

import io
import logging
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from fastckpt.data import DataState, data_state, load_data_state

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

EPOCHS, BATCHES = 3, 5


class Run:
    """A loop of epochs over a loader, at the same place in all that is saved."""

    def __init__(self, workers: int, length: int = 20, batch_size: int = 2, **options: Any) -> None:
        data = list(range(length))
        self.sampler = DistributedSampler(data, 2, 0, seed=3)
        self.loader = StatefulDataLoader(
            data, batch_size, sampler=self.sampler, generator=torch.Generator(), num_workers=workers, **options
        )
        self.epoch = 0

    def take(self, most: int = 1000) -> list[list[int]]:
        taken: list[list[int]] = []
        while self.epoch < EPOCHS:
            self.sampler.set_epoch(self.epoch)
            for batch in self.loader:
                taken.append(batch.tolist())
                if len(taken) == most:
                    return taken
            self.epoch += 1
        return taken

    def saved(self) -> tuple[int, DataState]:
        file = io.BytesIO()
        torch.save([self.epoch, *data_state(self.loader)], file)
        file.seek(0)
        epoch, common, own = torch.load(file, weights_only=True)
        return epoch, DataState(common, own)

    def load(self, saved: tuple[int, DataState]) -> "Run":
        self.epoch, state = saved
        load_data_state(self.loader, *state)
        return self


@pytest.mark.parametrize(
    ("workers", "options"), [(0, {}), (1, {"persistent_workers": True}), (1, {"snapshot_every_n_steps": 4})]
)
def test_a_stateful_data_loader_resumes_amid_and_at_the_end_of_an_epoch(workers: int, options: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    everything = Run(workers, **options).take()
    assert len(everything) == EPOCHS * BATCHES
    for most in (2, BATCHES, BATCHES + 3):
        run = Run(workers, **options)
        taken = run.take(most)
        assert taken + Run(workers, **options).load(run.saved()).take() == everything
    assert torch.equal(torch.get_rng_state(), before), "a resumed run draws what the other would"


def test_an_epoch_that_torchdata_would_skip_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once torchdata gives that epoch, the warning can go."""
    monkeypatch.setattr(logging.getLogger("fastckpt"), "propagate", True)

    def start() -> StatefulDataLoader:
        sampler = StatefulDistributedSampler(range(8), 2, 0)  # type: ignore[arg-type]
        return StatefulDataLoader(list(range(8)), 2, sampler=sampler, generator=torch.Generator())

    ended, again = start(), start()
    assert len(list(ended)) == 2
    load_data_state(again, *data_state(ended))
    assert "StatefulDistributedSampler without loader workers gives nothing in the next epoch" in caplog.text
    assert [len(list(again)), len(list(again))] == [0, 2]
