"""Streams that differ between openings, starts or ranks, and states that leave something out: counted, or refused."""

import itertools
import multiprocessing
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import IterableDataset

from fastckpt.data import ResumableDataLoader, data_state, load_data_state
from fastckpt.data.streams.checksum import checksum
from fastckpt.data.streams.trial import Seen
from fastckpt.errors import ConfigError
from tests.unit.data.jobs import Endless, Remembering, indices
from tests.unit.data.streams import Buffered, Packed, hugging_face


def batch_of(batch: Any) -> list[int]:
    return batch["i"].tolist() if isinstance(batch, dict) else indices(batch)


def killed_every(make: Any, batches: int, epochs: int = 1, **options: Any) -> list[list[int]]:
    """What a job hands out in each epoch that saves each step and starts again after some batches."""
    used: list[list[int]] = [[] for _ in range(epochs)]
    state = None
    while True:
        loader = ResumableDataLoader(make(), 4, **options)
        if state:
            load_data_state(loader, *state)
        taken = 0
        while loader.epoch < epochs and taken < batches:
            for batch in loader:
                used[loader.epoch] += batch_of(batch)
                state, taken = data_state(loader), taken + 1
                if taken == batches:
                    break
        if loader.epoch == epochs:
            return used


# ---------- what cannot be opened again ----------


class Once(IterableDataset):
    """Hands out what was opened when it was made."""

    def __init__(self, length: int) -> None:
        self.samples = iter(range(length))

    def __iter__(self) -> Iterator[int]:
        return self.samples


class Reshuffled(IterableDataset):
    """Shuffles in each epoch what the last one left: a resume in its third would have neither of the orders before."""

    def __init__(self, length: int) -> None:
        self.samples, self.epoch = list(range(length)), 0

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            random.Random(epoch).shuffle(self.samples)
            self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.samples)


@pytest.mark.parametrize(("sharded", "workers"), [(False, 0), (True, 1)])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Buffered, "Buffered gives other samples when it is opened again: sample [0-9]+ is another one.*set_epoch"),
        (Once, "sample 0 is another one"),
        (Reshuffled, "Reshuffled gives other samples when it is opened again"),
    ],
)
def test_a_stream_that_differs_between_openings_is_refused(make: Any, says: str, sharded: bool, workers: int) -> None:
    loader = ResumableDataLoader(make(100), 4, sharded=sharded, num_workers=workers)
    with pytest.raises(ConfigError, match=f"{says}.*repeatable=False"):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_declared_unrepeatable_is_accepted_with_a_log_line(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is read that is not handed out."""
    loader = ResumableDataLoader(Once(100), 4, repeatable=False, num_workers=workers)
    assert [indices(batch) for batch in loader] == [list(range(i, i + 4)) for i in range(0, 100, 4)]
    used = killed_every(lambda: Buffered(100), 10, repeatable=False)
    assert len(used[0]) == 100 and len(set(used[0])) < 100
    assert caplog.text.count("Buffered need not give the same samples at each start (repeatable=False)") == 3
    assert "is not the one" not in caplog.text


# ---------- what is another one after a restart ----------


@pytest.mark.parametrize(("sharded", "workers"), [(False, 0), (True, 2)])
def test_another_stream_after_a_restart_warns(sharded: bool, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """As one that is seeded by the clock where it is made: both openings of a start are alike."""
    options = {"sharded": sharded, "num_workers": workers, "seeding": "none", "collate_fn": list}

    def make(seed: int) -> Buffered:
        made = Buffered(60, seed)
        made.sample = int  # type: ignore[assignment]
        return made

    loader = ResumableDataLoader(make(1), 4, **options)
    list(itertools.islice(loader, 5))
    same, other, old = (ResumableDataLoader(make(seed), 4, **options) for seed in (1, 2, 2))
    state = data_state(loader)
    load_data_state(same, *state)
    assert len(list(same)) >= 10 and "is not the one" not in caplog.text
    load_data_state(other, *state)
    assert len(list(other)) >= 10, "a warning, and no refusal that comes first at a restart"
    assert caplog.text.count("is not the one that was used before the restart") == 1
    assert "some of its samples are lost and others used twice" in caplog.text
    caplog.clear()
    earlier = ({"checksum"}, {"checksums", "counted"})
    common, own = ({k: v for k, v in part.items() if k not in new} for part, new in zip(state, earlier, strict=True))
    load_data_state(old, common, own)
    assert len(list(old)) >= 10 and not caplog.text, "a checkpoint of an earlier version says nothing of it"


# ---------- ranks ----------


def reads_unlike(rank: int, store: Path) -> list[Any]:
    """What a rank reads of four streams: the number of its batches, or the refusal."""
    found: list[Any] = []
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for make in (lambda: Buffered(60, 1), lambda: Buffered(60, rank), lambda: Endless(20 + rank), lambda: Endless(7)):
        try:
            found.append(len(list(ResumableDataLoader(make(), 4, num_workers=rank))))
        except ConfigError as error:
            found.append(str(error))
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_ranks_that_read_unlike_streams_are_refused(tmp_path: Path) -> None:
    """Each opening of a rank's stream is like the others of that rank: only ranks can compare them."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        said = list(pool.map(reads_unlike, range(2), [tmp_path / "store"] * 2, timeout=120))
    assert [each[0] for each in said] == [8, 8] and [each[3] for each in said] == [1, 1]
    for wrong in (1, 2):
        [refusal] = [each[wrong] for each in said if isinstance(each[wrong], str)]  # whoever comes later raises it
        assert "gives other samples on rank" in refusal and "needs sharded=True" in refusal


# ---------- states that leave something out ----------


class SharedEpoch(IterableDataset):
    """As Hugging Face's: the epoch is in shared memory, and the difference is added; here it takes time."""

    def __init__(self) -> None:
        self.shared = torch.tensor(0).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        difference = epoch - int(self.shared)
        time.sleep(0.3 * (difference != 0))
        self.shared += difference

    def __iter__(self) -> Iterator[int]:
        time.sleep(0.5)
        yield from [int(self.shared)] * 40


@pytest.mark.parametrize("sharded", [False, True])
def test_workers_that_set_a_shared_epoch_at_the_same_time_read_that_epoch(sharded: bool) -> None:
    loader = ResumableDataLoader(SharedEpoch(), 4, num_workers=2, sharded=sharded, repeatable=True)
    loader.set_epoch(1)
    assert {i for batch in itertools.islice(loader, 4) for i in batch_of(batch)} == {1}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shuffle_of_hugging_face_without_a_seed_is_refused(workers: int) -> None:
    """All openings of one process are alike; each start has another generator."""
    interleaved = datasets.interleave_datasets([hugging_face(50), hugging_face(50)], probabilities=[0.5, 0.5])
    for made in (hugging_face(50).shuffle(), interleaved):
        with pytest.raises(ConfigError, match=r"IterableDataset is shuffled without a seed.*shuffle\(seed=0\)"):
            next(iter(ResumableDataLoader(made, 4, sharded=True, num_workers=workers)))
    next(iter(ResumableDataLoader(hugging_face(50).shuffle(), 4, repeatable=False)))


def test_a_checkpoint_of_an_earlier_version_resumes_a_stream_by_count() -> None:
    def make() -> Any:
        return hugging_face(120).shuffle(seed=1, buffer_size=50)

    whole = [i for batch in ResumableDataLoader(make(), 4) for i in batch_of(batch)]
    earlier = ResumableDataLoader(make(), 4, count=False, repeatable=True)
    taken = [i for batch in itertools.islice(earlier, 5) for i in batch_of(batch)]
    common, own = data_state(earlier)
    assert own["dataset"] != [None]
    del own["checksums"], own["counted"]
    again = ResumableDataLoader(make(), 4)
    load_data_state(again, common, own)
    assert taken + [i for batch in again for i in batch_of(batch)] == whole


def test_a_stream_state_that_restores_another_position_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    for workers in (0, 2):
        used = killed_every(lambda: Packed(50), 7, 2, num_workers=workers)
        assert [sorted(epoch) for epoch in used] == [list(range(50))] * 2
        assert "Packed's own state leaves out what it holds ready" in caplog.text
        caplog.clear()
    assert sorted(killed_every(lambda: Packed(50), 5, count=True)[0]) == list(range(50)) and not caplog.text
    chosen = killed_every(lambda: Packed(50), 5, count=False)[0]
    assert len(set(chosen)) < 50 and not caplog.text
    assert sorted(killed_every(lambda: Remembering(50), 5, 2)[1]) == list(range(50)) and not caplog.text


# ---------- checksums ----------


class Plain:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def samples(flip: int) -> Iterator[Any]:
    """What data sets give; ``flip`` changes a single bit or item of each."""
    image = Image.new("RGB", (4, 4))
    image.putpixel((3, 3), (0, 0, flip))
    yield from (flip, float(flip), f"a{flip}", bytes([1, flip]), bytearray([flip]), memoryview(bytes([flip])), image)
    yield from ([1, flip], (1, [flip]), {"x": {"y": flip}}, {flip: 1}, {1, flip + 5}, Plain(x=Plain(y=flip)))
    yield from (torch.tensor([1.0, flip]), torch.tensor(flip), torch.tensor([flip], dtype=torch.bfloat16))
    yield torch.tensor([1 + 1j, flip]).conj()
    yield from (np.array([1, flip]), np.float32(flip), np.array([{"a": flip}], dtype=object), np.zeros((2, 1 + flip)))
    yield torch.zeros(2, 1 + flip)
    yield {"image": image, "json": {"list": [{"deep": [flip]}]}, "lock": object()}
    yield Seen([flip])


def test_checksums_differ_for_unlike_samples() -> None:
    """That processes agree on them: test_workers.py."""
    for same, again, other in zip(samples(0), samples(0), samples(1), strict=True):
        assert checksum(same) == checksum(again) < 2**63, type(same)
        assert checksum(same) != checksum(other), type(same)
