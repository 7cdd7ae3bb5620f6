"""Savers whose directory another job saves to, or has saved to."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fastckpt._core.saver.persistence import persister
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.ddp import DdpCheckpointer, StorageType
from fastckpt.errors import ConfigError, PersistError
from tests.e2e.ddp.conftest import Ranks, state


def test_memory_of_a_history_that_another_job_opened_is_discarded(
    ranks: Ranks, directory: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    """While the directory was silent, another job opened that history: what this one holds is of another line."""
    monkeypatch.setattr(persister, "ATTEMPTS", 1)

    def refuse(*_: Any, **__: Any) -> None:
        raise PersistError("as the test says")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointDirectory, "publish", refuse)
        (member,) = ranks.start()
        member.save_checkpoint(1, state(1), storage_type=StorageType.DISK)
        ranks.end()
    record = CheckpointDirectory(directory).histories.read(1)
    assert record is not None and record.closed and record.token
    (directory / ".fastckpt/history-1").write_bytes(replace(record, token="another").to_bytes())
    ranks.start()
    assert ranks.load()[0] == {} and "another job has opened its history" in said.text
    ranks.end()


def test_a_node_that_is_no_longer_first_lets_another_open_the_next_history(
    ranks: Ranks, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that joins may be numbered before it, and is no member of its record."""
    (member,) = ranks.start()
    member.save_checkpoint(1, state(1), storage_type=StorageType.DISK)
    member.wait_latest_checkpoint(60)
    histories = CheckpointDirectory(directory).histories
    before = histories.read(1)
    ranks.workers_die()
    monkeypatch.setenv("GROUP_RANK", "1")
    ranks.start_workers()
    after = histories.read(1)
    assert before is not None and after is not None and (before.closed, after.closed) == (False, True)


def test_the_final_report_says_that_the_newest_checkpoint_is_gone(ranks: Ranks, directory: Path, said: Any) -> None:
    (member,) = ranks.start()
    member.save_checkpoint(1, state(1), storage_type=StorageType.DISK)
    member.wait_latest_checkpoint(60)
    shutil.rmtree(directory / "checkpoint-1")
    ranks.end()
    assert f"step 1 of history 1, the newest that was durable in {directory}, is not there any more" in said.text


def test_a_store_that_cannot_tell_two_jobs_apart_is_refused_or_accepted(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    class Unknown(MemoryFileSystem):
        protocol = "unknown"

    fsspec.register_implementation("unknown", Unknown, clobber=True)
    ranks.directory = f"unknown://{tmp_path.name}/run"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"cannot be told apart.*--fast-no-exclusive"):
        ranks.start()
    ranks.end()
    monkeypatch.setenv("FASTCKPT_EXCLUSIVE", "no")
    (member,) = ranks.start()
    assert isinstance(member, DdpCheckpointer)
    member.save_checkpoint(1, state(1), storage_type=StorageType.DISK)
    assert member.wait_latest_checkpoint(60) == 1
    assert "cannot exclude a second job" in said.text
