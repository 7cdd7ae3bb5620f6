"""A newest checkpoint that is whole and cannot be read: it is tried again, and never passed over for an older one."""

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.resume import survey
from fastckpt.ddp import DdpCheckpointer, StorageType
from fastckpt.errors import NoLoadableCheckpoint
from tests.e2e.ddp.conftest import Ranks, directory, said, small_disk, state  # noqa: F401 (fixtures)
from tests.e2e.ddp.conftest import ranks as ranks_of_a_job  # noqa: F401 (fixture)
from tests.unit._core.saver.persistence.test_uploader import newest_at
from tests.unit._core.storage.s3 import S3, Fault, s3, s3_server  # noqa: F401 (fixtures)

URL = "s3://bucket/run"
NEWEST = r"checkpoint-2/.*model\.pt"
ALWAYS = 10**6


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "PAUSE", 0.05)
    monkeypatch.setattr(survey, "LIMIT", 1.0)


@pytest.fixture
def ranks(s3: S3, ranks_of_a_job: Ranks) -> Ranks:  # noqa: F811
    """Ranks that end before their store does: a saver waits long for one that is gone."""
    return ranks_of_a_job


@pytest.fixture
def two(ranks: Ranks, s3: S3) -> S3:  # noqa: F811
    """Steps 1 and 2 in a bucket, of a job of two ranks that has ended."""
    ranks.directory = URL
    publish(ranks)
    return s3


def publish(ranks: Ranks, **options: Any) -> None:
    def save(member: DdpCheckpointer, _: int) -> None:
        for step in (1, 2):
            member.save_checkpoint(step, state(step), storage_type=StorageType.DISK)
            member.wait_latest_checkpoint(60)

    ranks.start(2, **options)
    ranks.together(save)
    ranks.end()


def steps(ranks: Ranks) -> list[int]:
    return [loaded["step"] for loaded in ranks.load()]


def test_an_unreadable_newest_checkpoint_is_an_error_on_all_ranks_and_is_kept(ranks, two):
    fault = two.inject(Fault(403, "GET", NEWEST, times=ALWAYS))
    before = two.objects()
    members = ranks.start(2)
    refused = []
    for _ in range(2):

        def load(member: DdpCheckpointer, _: int) -> str:
            with pytest.raises(NoLoadableCheckpoint) as caught:
                member.load_checkpoint()
            return str(caught.value)

        refused += ranks.together(load)
    assert len(set(refused)) == 1 and "step 2 of history 1 in storage is whole and cannot be read" in refused[0]
    assert "credentials" in refused[0] and "No older checkpoint is loaded in its place" in refused[0]
    assert fault.injected > 4, "it was tried again"
    assert two.objects() == before, "it is not quarantined"
    two.proxy.faults.clear()
    assert steps(ranks) == [2, 2]
    assert members[0].loaded_from == "storage"


def test_a_checkpoint_that_becomes_readable_on_a_retry_is_loaded(ranks, two, said, monkeypatch):  # noqa: F811
    monkeypatch.setattr(survey, "LIMIT", 45.0)  # of which it needs what three attempts take, on any machine
    fault = two.inject(Fault(403, "GET", NEWEST, times=3))
    ranks.start(2)
    assert steps(ranks) == [2, 2]
    assert fault.injected == 3
    assert said.text.count("is whole and cannot be read") == 1 and "for up to 45 s" in said.text


def test_a_checkpoint_damaged_for_one_rank_and_unreadable_for_another_is_skipped(ranks, two):
    """Though the other cannot read its file: it cannot come to be whole."""
    two.inject(Fault(403, "GET", r"checkpoint-2/.*rank_0\.pt", times=ALWAYS))
    spoilt = next(key for key in two.objects() if "checkpoint-2/" in key and key.endswith("rank_1.pt"))
    two.fs.pipe_file(spoilt, bytes(two.objects()[spoilt]))
    ranks.start(2)
    assert steps(ranks) == [1, 1]


def test_a_full_download_directory_is_named_in_the_error(ranks, two, small_disk, monkeypatch):  # noqa: F811
    """It is no fault of the store, and no damage."""
    monkeypatch.setattr(tempfile, "tempdir", str(place := small_disk(8)))
    filler = place / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=1k"], check=False, capture_output=True)
    os.truncate(filler, filler.stat().st_size - 4096)  # the directories find room
    ranks.start(2)
    with pytest.raises(NoLoadableCheckpoint, match=r"cannot download model\.pt to .*No space left on device.*KiB"):
        ranks.load()
    filler.unlink()
    assert steps(ranks) == [2, 2]


@pytest.mark.parametrize("damaged", [False, True])
def test_an_unreadable_checkpoint_is_loaded_from_another_tier_that_has_it(ranks, s3, damaged):  # noqa: F811
    publish(ranks, remote=URL)
    assert newest_at(URL) == 2
    s3.inject(Fault(403, "GET", NEWEST, times=ALWAYS))
    if damaged:
        (model,) = Path(ranks.directory).glob("checkpoint-2/model.pt")
        model.write_bytes(bytes(model.stat().st_size))
    members = ranks.start(2, remote=URL)
    if not damaged:
        assert steps(ranks) == [2, 2]
        assert members[0].loaded_from == "storage"
        return
    with pytest.raises(NoLoadableCheckpoint, match="step 2 of history 1 in remote is whole and cannot be read"):
        ranks.load()
    s3.proxy.faults.clear()
    assert steps(ranks) == [2, 2]
    assert members[0].loaded_from == "remote"
