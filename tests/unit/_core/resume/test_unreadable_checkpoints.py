"""A newest checkpoint that is whole and cannot be read: it is tried again, and never passed over for an older one."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.resume import survey
from fastckpt.ddp import DdpCheckpointer, StorageType
from fastckpt.errors import NoLoadableCheckpoint
from tests.e2e.ddp.conftest import Ranks, small_disk, state  # noqa: F401 (a fixture)
from tests.unit._core.saver.peers.agents import flip
from tests.unit._core.saver.persistence.files_at_url import (
    FilesAtUrl,
    newest_at,
    place_of,
    url_of_files,  # noqa: F401 (a fixture)
)

NEWEST = r"checkpoint-2/.*model\.pt"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "PAUSE", 0.05)
    monkeypatch.setattr(survey, "LIMIT", 0.5)


def publish(ranks: Ranks, **options: Any) -> None:
    """Have a job of two ranks save steps 1 and 2."""

    def save(member: DdpCheckpointer, _: int) -> None:
        for step in (1, 2):
            member.save_checkpoint(step, state(step), storage_type=StorageType.DISK)
            member.wait_latest_checkpoint(60)

    ranks.start(2, **options)
    ranks.together(save)
    ranks.end()


@pytest.fixture
def two(ranks: Ranks, url: str) -> Path:
    """Objects of steps 1 and 2 at a URL."""
    ranks.directory = url  # type: ignore[assignment]
    publish(ranks)
    return place_of(url)


def steps(ranks: Ranks) -> list[int]:
    return [loaded["step"] for loaded in ranks.load()]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("checkpoint-*/**/*") if path.is_file()}


def test_an_unreadable_newest_checkpoint_is_an_error_for_all_unless_it_is_damaged_for_one(
    ranks: Ranks, two: Path, said, monkeypatch
):
    FilesAtUrl.refuse(NEWEST)
    before = contents(two)
    members = ranks.start(2)
    refused = [text for _ in range(2) for text in ranks.refusals()]
    assert len(set(refused)) == 1 and "step 2 of history 1 in storage is whole and cannot be read" in refused[0]
    assert "credentials" in refused[0] and "No older checkpoint is loaded in its place" in refused[0]
    assert FilesAtUrl.refused > 4, "it was tried again"
    assert contents(two) == before, "it is not quarantined"
    said.clear()
    FilesAtUrl.refuse(NEWEST, times=3)
    with monkeypatch.context() as patch:
        patch.setattr(survey, "LIMIT", 45.0)  # of which it needs what three attempts take, on any machine
        assert steps(ranks) == [2, 2] and members[0].loaded_from == "storage" and FilesAtUrl.refused == 3
    assert said.text.count("is whole and cannot be read") == 1 and "for up to 45 s" in said.text
    ranks.end()
    FilesAtUrl.refuse(r"checkpoint-2/.*rank_0\.pt")  # and what is damaged cannot come to be whole
    (spoilt,) = two.rglob("checkpoint-2/**/rank_1.pt")
    flip(spoilt)
    ranks.start(2)
    assert steps(ranks) == [1, 1]


def test_a_full_download_directory_is_named_in_the_error(ranks: Ranks, two: Path, small_disk, monkeypatch):  # noqa: F811
    """It is no fault of the store, and no damage."""
    monkeypatch.setattr("tempfile.tempdir", str(place := small_disk(8)))
    filler = place / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=1k"], check=False, capture_output=True)
    os.truncate(filler, filler.stat().st_size - 4096)  # the directories find room
    ranks.start(2)
    with pytest.raises(NoLoadableCheckpoint, match=r"cannot download model\.pt to .*No space left on device.*KiB"):
        ranks.load()
    filler.unlink()
    assert steps(ranks) == [2, 2]


def test_an_unreadable_checkpoint_is_loaded_from_another_tier_that_has_it(ranks: Ranks, url: str):
    publish(ranks, remote=url)
    assert newest_at(url) == 2
    FilesAtUrl.refuse(NEWEST)
    members = ranks.start(2, remote=url)
    assert ranks.resume() == [(2, "storage")] * 2
    (model,) = Path(ranks.directory).glob("checkpoint-2/model.pt")
    model.write_bytes(bytes(model.stat().st_size))
    ranks.workers_die()
    members = ranks.start_workers(2, remote=url)
    with pytest.raises(NoLoadableCheckpoint, match="step 2 of history 1 in remote is whole and cannot be read"):
        ranks.load()
    FilesAtUrl.refuse(times=0)
    assert steps(ranks) == [2, 2] and members[0].loaded_from == "remote"
