"""torchdata's StatefulDataLoader, saved and loaded as a checkpointer does: resumes, and refusals."""

import io
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from fastckpt.data import DataState, data_state, load_data_state

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

EPOCHS, BATCHES, DATA = 3, 5, list(range(20))


class Run:
    """A loop of epochs over a loader, at the same place in all that is saved."""

    def __init__(self, way: str, **options: Any) -> None:
        self.sampler = DistributedSampler(DATA, 2, 0, seed=3) if way == "sampler" else None
        generator = torch.Generator().manual_seed(3) if way != "global generator" else None
        options |= {"sampler": self.sampler, "batch_size": 2} if self.sampler else {"shuffle": True, "batch_size": 4}
        self.loader = StatefulDataLoader(DATA, generator=generator, **options)
        self.epoch = 0

    def take(self, most: int = 1000) -> list[list[int]]:
        taken: list[list[int]] = []
        while self.epoch < EPOCHS:
            if self.sampler:
                self.sampler.set_epoch(self.epoch)
            for batch in self.loader:
                taken.append(batch.tolist())
                if len(taken) == most:
                    return taken
            self.epoch += 1
        return taken

    def saved(self) -> tuple[int, DataState, torch.Tensor]:
        file = io.BytesIO()
        torch.save([self.epoch, *data_state(self.loader), torch.get_rng_state()], file)
        file.seek(0)
        epoch, common, own, rng = torch.load(file, weights_only=True)
        return epoch, DataState(common, own), rng

    def load(self, saved: tuple[int, DataState, torch.Tensor]) -> "Run":
        self.epoch, state, rng = saved
        torch.set_rng_state(rng)
        load_data_state(self.loader, *state)
        return self


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("sampler", {}),
        ("sampler", {"num_workers": 1, "persistent_workers": True, "snapshot_every_n_steps": 4}),
        ("own generator", {}),
        ("global generator", {"num_workers": 1}),
    ],
)
def test_a_stateful_data_loader_resumes_as_an_uninterrupted_run(
    way: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Amid and at the end of an epoch; and so does what training draws."""
    torch.manual_seed(5)
    everything = Run(way, **options).take()
    drawn = torch.get_rng_state()
    assert len(everything) == EPOCHS * BATCHES
    for most in (BATCHES, BATCHES + 3):
        torch.manual_seed(5)
        run = Run(way, **options)
        taken, saved = run.take(most), run.saved()
        torch.rand(3)
        assert taken + Run(way, **options).load(saved).take() == everything
        assert torch.equal(torch.get_rng_state(), drawn), "a resumed run draws what the other would"
    assert not caplog.messages
    early = Run(way, **options)
    iter(early.loader)
    early.load(saved)
    assert "was iterated before resume()" in caplog.text
    saved[1].own.pop("generator", None)
    Run(way, **options).load(saved)  # an earlier version's


def test_an_epoch_that_torchdata_would_skip_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once torchdata gives that epoch, the warning can go."""

    def start() -> StatefulDataLoader:
        sampler = StatefulDistributedSampler(range(8), 2, 0)  # type: ignore[arg-type]
        return StatefulDataLoader(list(range(8)), 2, sampler=sampler, generator=torch.Generator())

    ended, again = start(), start()
    assert len(list(ended)) == 2
    load_data_state(again, *data_state(ended))
    assert "StatefulDistributedSampler without loader workers gives nothing in the next epoch" in caplog.text
    assert [len(list(again)), len(list(again))] == [0, 2]
