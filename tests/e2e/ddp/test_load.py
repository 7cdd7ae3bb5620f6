"""load_checkpoint: the state it returns, its tier, and damaged checkpoints."""

import ctypes
import dataclasses
import itertools
import json
import os
import shutil
import stat
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastckpt import ddp
from fastckpt._core import metrics
from fastckpt._core.format import manifest
from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import arena_path
from fastckpt._core.resume.load import load_copy
from fastckpt._core.retention import Deletion
from fastckpt._core.saver import memory_digests
from fastckpt._core.saver.persistence import persister
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local import publish
from fastckpt._core.storage.local import stored as stored_module
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.ddp import StorageType, settle
from fastckpt.errors import BadCheckpoint, ConfigError, NoLoadableCheckpoint, PersistError
from tests.e2e.ddp.conftest import Ranks, state, until

DISK, MEMORY = StorageType.DISK, StorageType.MEMORY


def save(ranks: Ranks, *steps: int, storage_type: StorageType = DISK) -> None:
    """All ranks save these steps, and wait until they are durable."""
    for step in steps:
        for rank, member in enumerate(ranks.members):
            own = {"position": 100 * step + rank}
            assert member.save_checkpoint(step, state(step), storage_type=storage_type, rank_state=own)
        if storage_type is DISK:
            assert ranks.members[0].wait_latest_checkpoint(60) == step


class Unknown:
    """What torch.load(weights_only=True) refuses."""


def relaunch(ranks: Ranks, world: int = 2) -> list[dict[str, Any]]:
    """End the job, memory included; start it again and load."""
    ranks.end()
    ranks.start(world)
    return ranks.load()


def flip(path: Path, offset: int | None = None) -> None:
    """Damage one byte, past the caches of nobody: the size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if offset is None else offset] ^= 0x10
    path.write_bytes(data)


class TestLoadedState:
    def test_a_load_without_any_checkpoint_returns_an_empty_state(self, ranks: Ranks):
        (one,) = ranks.start()
        assert one.load_checkpoint() == {}
        assert (one.loaded_step, one.loaded_from, one.rank_state) == (-1, "", {})

    def test_a_load_from_memory_gives_each_rank_its_own_state(self, ranks: Ranks):
        ranks.start(2)
        save(ranks, 3, storage_type=StorageType.MEMORY)
        ranks.workers_die()
        ranks.start_workers(2)
        assert [loaded["step"] for loaded in ranks.load()] == [3, 3]
        assert [member.rank_state for member in ranks.members] == [{"position": 300}, {"position": 301}]
        assert {(member.loaded_step, member.loaded_from) for member in ranks.members} == {(3, "memory")}

    def test_random_numbers_continue_after_a_load(self, ranks: Ranks):
        (one,) = ranks.start()
        torch.manual_seed(1)
        one.save_checkpoint(1, state(1), storage_type=MEMORY)
        expected = torch.rand(3)
        torch.manual_seed(2)
        one.load_checkpoint()
        assert torch.equal(torch.rand(3), expected)

    def test_a_loaded_state_does_not_alias_shared_memory(self, ranks: Ranks):
        (one,) = ranks.start()
        one.save_checkpoint(1, state(1, 70_000), storage_type=MEMORY)
        loaded = one.load_checkpoint()
        for step in range(2, 8):  # each slot is written to
            one.save_checkpoint(step, state(step, 70_000), storage_type=MEMORY)
        assert torch.equal(loaded["weights"], state(1, 70_000)["weights"])
        assert not _mapped_in_arena(loaded["weights"])

    def test_two_ranks_that_train_after_a_load_do_not_share_memory(self, ranks: Ranks):
        """optimizer.load_state_dict keeps the tensors it is given; as views of an image ranks would share them."""
        ranks.start(2)
        model = nn.Linear(300, 300)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        for member in ranks.members:
            member.save_checkpoint(1, whole, storage_type=MEMORY)
        trained = []
        for loaded in ranks.load():
            other = nn.Linear(300, 300)
            other.load_state_dict(loaded["model"])
            trained.append(torch.optim.AdamW(other.parameters()))
            trained[-1].load_state_dict(loaded["optimizer"])
        first, second = ([s["exp_avg"] for s in o.state_dict()["state"].values()] for o in trained)
        before = [moment.clone() for moment in second]
        for moment in first:
            moment.fill_(7)
        assert all(torch.equal(moment, was) for moment, was in zip(second, before, strict=True))
        assert [loaded["model"].keys() for loaded in ranks.load()] == [whole["model"].keys()] * 2
        again = ranks.load()[0]["optimizer"]["state"][0]["exp_avg"]
        assert torch.equal(again, before[0])

    def test_loaded_tensors_are_aligned_and_share_storages_as_before(self, ranks: Ranks):
        (one,) = ranks.start()
        shared = torch.arange(1000.0)
        whole = {
            **{f"odd {size}": torch.ones(size, dtype=torch.uint8) for size in (1, 3, 63, 65, 4097)},
            "shared": shared,
            "same": shared,
            "view": shared[10:20],
            "columns": shared.view(10, 100).t(),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(5, dtype=torch.int16),
            "complex": torch.randn(3, dtype=torch.complex64),
            "half": torch.ones(3, dtype=torch.bfloat16),
            "flags": torch.tensor([True, False]),
        }
        one.save_checkpoint(1, whole, storage_type=MEMORY)
        loaded = one.load_checkpoint()
        for name, tensor in whole.items():
            assert torch.equal(loaded[name], tensor), name
            assert (loaded[name].dtype, loaded[name].stride()) == (tensor.dtype, tensor.stride())
            assert loaded[name].untyped_storage().data_ptr() % 64 == 0
        loaded["shared"][15] = -1
        assert (loaded["same"][15], loaded["view"][5], loaded["columns"][15, 0]) == (-1, -1, -1)
        assert loaded["view"].untyped_storage().nbytes() == shared.untyped_storage().nbytes()

    def test_a_load_with_another_number_of_threads_warns(self, ranks: Ranks, said):
        (one,) = ranks.start()
        before = torch.get_num_threads()
        one.save_checkpoint(1, state(1), storage_type=MEMORY)
        try:
            one.load_checkpoint()
            assert "OMP_NUM_THREADS" not in said.text
            torch.set_num_threads(before + 1)
            one.load_checkpoint()
        finally:
            torch.set_num_threads(before)
        assert f"OMP_NUM_THREADS={before}" in said.text

    def test_settle_changes_no_value_of_a_loaded_state(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        random_state = torch.get_rng_state()
        settle(model, lambda: model(torch.randn(4, 3)).sum().backward())
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.equal(torch.get_rng_state(), random_state)


class TestTiers:
    def test_a_load_after_a_good_end_is_the_last_flush(self, ranks: Ranks, directory: Path):
        ranks.start(2)
        save(ranks, 1)
        save(ranks, 2, 3, storage_type=StorageType.MEMORY)
        arena = ranks.members[0]._writer.link.arena
        assert [loaded["step"] for loaded in relaunch(ranks)] == [3, 3]
        assert {member.loaded_from for member in ranks.members} == {"storage"}
        assert [member.rank_state for member in ranks.members] == [{"position": 300}, {"position": 301}]
        ranks.end()
        assert not arena.exists()

    def test_a_load_after_an_end_without_flush_is_the_last_persisted(self, ranks: Ranks, monkeypatch):
        monkeypatch.setenv("FASTCKPT_FLUSH", "no")
        ranks.start(2)
        save(ranks, 1)
        save(ranks, 2, storage_type=StorageType.MEMORY)
        assert [loaded["step"] for loaded in relaunch(ranks)] == [1, 1]

    def test_a_load_prefers_storage_that_is_newer_than_memory(self, ranks: Ranks, directory: Path):
        """Another job on another host may have gone on meanwhile; here it is made from a copy."""
        ranks.start(1)
        save(ranks, 5)
        CheckpointDirectory(directory).publish(PublishRequest(_later(directory), _files(directory / "checkpoint-5")))
        (loaded,) = ranks.load()
        assert loaded["step"] == 5
        assert (ranks.members[0].loaded_step, ranks.members[0].loaded_from) == (9, "storage")

    @pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
    def test_a_load_with_another_number_of_ranks_succeeds(self, ranks: Ranks, said, before: int, after: int):
        ranks.start(before)
        save(ranks, 4)
        assert [loaded["step"] for loaded in relaunch(ranks, after)] == [4] * after
        assert [member.rank_state for member in ranks.members] == [{"position": 400}, {}][:after]
        assert ("rank 1 has no state of its own" in said.text) == (after > before)

    def test_a_load_without_memory_is_the_newest_on_storage(self, ranks: Ranks):
        ranks.start(2)
        save(ranks, 1, 2)
        save(ranks, 3, storage_type=StorageType.MEMORY)
        arena = ranks.members[0]._writer.link.arena
        ranks.workers_die()
        ranks.saver.close()  # type: ignore[union-attr]
        shutil.rmtree(arena, ignore_errors=True)
        shutil.rmtree(ranks.directory / "checkpoint-3")
        ranks.start(2)
        assert [loaded["step"] for loaded in ranks.load()] == [2, 2]


class TestResumePath:
    def test_resume_path_accepts_the_directory_of_a_checkpoint(self, ranks: Ranks, directory: Path):
        ranks.start(2)
        save(ranks, 1, 2)
        for path in (directory / "checkpoint-1", directory / "checkpoint-1" / "model.pt"):
            assert [loaded["step"] for loaded in ranks.load(path)] == [1, 1]
            assert [member.rank_state["position"] for member in ranks.members] == [100, 101]
            assert {(member.loaded_step, member.loaded_from) for member in ranks.members} == {(1, "storage")}

    def test_resume_path_accepts_a_relative_path(self, ranks: Ranks, directory: Path, monkeypatch):
        ranks.start()
        save(ranks, 1, 2)
        monkeypatch.chdir(directory)
        assert ranks.load("checkpoint-1")[0]["step"] == 1

    def test_resume_path_accepts_a_file_of_torch_save(self, ranks: Ranks, tmp_path: Path, said):
        ranks.start(2)
        torch.save({"anything": torch.ones(3)}, tmp_path / "theirs.pt")
        assert all(torch.equal(loaded["anything"], torch.ones(3)) for loaded in ranks.load(tmp_path / "theirs.pt"))
        assert "has no state of its own" in said.text

    def test_resume_path_accepts_a_file_saved_at_a_path_of_the_user(self, ranks: Ranks, tmp_path: Path):
        (one,) = ranks.start()
        one.save_checkpoint(6, state(6), tmp_path / "mine.pt", DISK, {"position": 6})
        one.wait_latest_checkpoint(60)
        assert one.load_checkpoint(tmp_path / "mine.pt")["step"] == 6
        assert one.rank_state == {"position": 6}

    def test_a_missing_resume_path_is_an_error_on_all_ranks(self, ranks: Ranks, tmp_path: Path):
        ranks.start(2)
        save(ranks, 1)

        def refused(member: Any, rank: int) -> str:
            with pytest.raises(BadCheckpoint, match=r"nowhere\.pt cannot be loaded: rank 0: .*; rank 1: "):
                member.load_checkpoint(tmp_path / "nowhere.pt")
            return "refused"

        assert ranks.together(refused) == ["refused"] * 2

    def test_a_damaged_resume_path_is_refused_without_a_fallback(self, ranks: Ranks, directory: Path):
        ranks.start(2)
        save(ranks, 1, 2)
        flip(directory / "checkpoint-2" / "model.pt")

        def refused(member: Any, rank: int) -> str:
            with pytest.raises(BadCheckpoint, match=r"rank 0: .*damaged"):
                member.load_checkpoint(directory / "checkpoint-2")
            return "refused"

        assert ranks.together(refused) == ["refused"] * 2

    @pytest.mark.parametrize("where", ["a directory of another run", "a file in one"])
    def test_a_resume_path_of_another_run_is_compared_with_its_manifest(self, ranks: Ranks, tmp_path: Path, where: str):
        ranks.start(2)
        save(ranks, 1)
        ranks.end()
        shutil.move(ranks.directory, tmp_path / "other")
        path = tmp_path / "other" / "checkpoint-1" / ("model.pt" if where == "a file in one" else "")
        ranks.start(2)
        assert [loaded["step"] for loaded in ranks.load(f"file://{path}")] == [1, 1]
        assert [(member.loaded_step, member.rank_state["position"]) for member in ranks.members] == [(1, 100), (1, 101)]
        flip(tmp_path / "other" / "checkpoint-1" / "model.pt", 3000)  # an element of a tensor
        with pytest.raises(BadCheckpoint, match=r"rank 0: .*model\.pt is damaged"):
            ranks.load(path)
        assert CheckpointDirectory(tmp_path / "other").scan().quarantined == []

    @pytest.mark.parametrize("name", ["model.pt", "rank_1.pt", "manifest.json"])
    def test_a_resume_path_whose_checkpoint_does_not_count_is_refused(self, ranks: Ranks, tmp_path: Path, name: str):
        """Also at the next attempt, when it was quarantined and the file that its user named is still there."""
        mine = tmp_path / "mine.pt"
        ranks.start(2)
        for rank, member in enumerate(ranks.members):
            member.save_checkpoint(1, state(1), mine, DISK, {"position": rank})
        ranks.members[0].wait_latest_checkpoint(60)
        save(ranks, 2)
        ranks.end()
        bad = mine if name == "model.pt" else ranks.directory / "checkpoint-1" / name
        if name == "rank_1.pt":
            bad.unlink()
        else:
            flip(bad, 3000 if name == "model.pt" else None)
        for _ in range(2):
            ranks.start(2)
            if name == "manifest.json":  # nothing tells what should be there
                assert [loaded["step"] for loaded in ranks.load(mine)] == [1, 1]
            else:
                with pytest.raises(BadCheckpoint, match="is damaged" if bad == mine else "is not there"):
                    ranks.load(mine)
            ranks.end()

    @pytest.mark.parametrize("pickled", [b"\x80\x02.", b"\x80\x02X\x01\x00\x00\x00aX\x01\x00\x00\x00bb."])
    def test_a_resume_path_that_torch_cannot_read_is_an_error_on_all_ranks(
        self, ranks: Ranks, tmp_path: Path, pickled: bytes
    ):
        """A damaged pickle raises IndexError and AttributeError, too."""
        torch.save(state(1), tmp_path / "whole.pt")
        with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "bad.pt", "w") as bad:
            for name in whole.namelist():
                bad.writestr(name, pickled if name.endswith("data.pkl") else whole.read(name))
        ranks.start(2)

        def refused(member: Any, rank: int) -> str:
            with pytest.raises(BadCheckpoint, match=r"(?s)rank 0: .*; rank 1: "):
                member.load_checkpoint(tmp_path / "bad.pt")
            return "refused"

        assert ranks.together(refused) == ["refused"] * 2

    def test_a_resume_path_opens_a_history_whose_smaller_steps_are_newest(self, ranks: Ranks, directory: Path):
        ranks.start(2)
        save(ranks, 1, 2, 8)
        assert [loaded["step"] for loaded in ranks.load(directory / "checkpoint-2")] == [2, 2]
        save(ranks, 3)
        assert [loaded["step"] for loaded in ranks.load()] == [3, 3]
        assert [loaded["step"] for loaded in relaunch(ranks)] == [3, 3]
        newest = CheckpointDirectory(directory).checkpoints()[0]
        assert newest.id.step == 3
        assert newest.manifest.parent is not None and newest.manifest.parent.step == 2

    def test_a_resume_path_to_a_smaller_step_at_the_start_opens_a_new_history(self, ranks: Ranks, directory: Path):
        ranks.start(2)
        save(ranks, 1, 2, 8)
        ranks.end()
        ranks.start(2)
        assert [loaded["step"] for loaded in ranks.load(directory / "checkpoint-1")] == [1, 1]
        save(ranks, 2)
        assert [loaded["step"] for loaded in relaunch(ranks)] == [2, 2]


class TestDamage:
    @pytest.fixture
    def three(self, ranks: Ranks) -> Ranks:
        ranks.start(2)
        save(ranks, 1, 2, 3)
        ranks.end()
        return ranks

    def restart(self, ranks: Ranks) -> list[dict[str, Any]]:
        ranks.start(2)
        return ranks.load()

    @pytest.mark.parametrize("name", ["model.pt", "rank_0.pt", "rank_1.pt", "manifest.json"])
    @pytest.mark.parametrize("how", ["flipped", "truncated", "emptied", "removed"])
    def test_damage_of_the_newest_makes_all_ranks_fall_back_to_the_one_before(self, three: Ranks, name: str, how: str):
        path = three.directory / "checkpoint-3" / name
        match how:
            case "flipped":
                flip(path)
            case "truncated":
                os.truncate(path, path.stat().st_size // 2)
            case "emptied":
                os.truncate(path, 0)
            case "removed":
                path.unlink()
        assert [loaded["step"] for loaded in self.restart(three)] == [2, 2]
        assert [member.rank_state["position"] for member in three.members] == [200, 201]

    def test_no_rank_reads_a_file_that_was_found_damaged(self, three: Ranks, monkeypatch):
        """torch.load of damaged bytes may abort the process: all verify before any loads."""
        read: list[str] = []

        def noted(path: Path, *args: Any, **options: Any) -> Any:
            read.append(path.parent.name)
            return load_copy(path, *args, **options)

        monkeypatch.setattr(ddp, "load_copy", noted)
        flip(three.directory / "checkpoint-3" / "model.pt")
        assert [loaded["step"] for loaded in self.restart(three)] == [2, 2]
        assert "checkpoint-3" not in read and len(read) == 4

    def test_damage_of_two_in_a_row_makes_all_ranks_fall_back_twice(self, three: Ranks, said):
        flip(three.directory / "checkpoint-3" / "model.pt")
        flip(three.directory / "checkpoint-2" / "rank_1.pt")
        assert [loaded["step"] for loaded in self.restart(three)] == [1, 1]
        assert "not resumed from step 3" in said.text and "not resumed from step 2" in said.text

    def test_damage_of_all_checkpoints_is_no_fresh_start(self, three: Ranks):
        for step, name in ((1, "model.pt"), (2, "rank_0.pt"), (3, "rank_1.pt")):
            flip(three.directory / f"checkpoint-{step}" / name)
        self.refuses_a_fresh_start(three)

    def test_truncation_of_all_checkpoints_is_no_fresh_start(self, three: Ranks):
        for step in (1, 2, 3):
            os.truncate(three.directory / f"checkpoint-{step}" / "model.pt", 10)
        self.refuses_a_fresh_start(three)

    def test_damage_of_all_manifests_is_no_fresh_start(self, three: Ranks):
        for step in (1, 2, 3):
            (three.directory / f"checkpoint-{step}" / "manifest.json").write_text("{}")
        self.refuses_a_fresh_start(three)

    def refuses_a_fresh_start(self, ranks: Ranks) -> None:
        ranks.start(2)

        def refused(member: Any, rank: int) -> str:
            with pytest.raises(
                NoLoadableCheckpoint, match="holds checkpoints, but none that all ranks can load"
            ) as info:
                member.load_checkpoint()
            return str(info.value)

        first, second = ranks.together(refused)
        assert first == second
        assert all(f"checkpoint-{step}" in first or f"step {step}" in first for step in (1, 2, 3))

    def test_after_a_fallback_the_job_saves_the_damaged_step_again(self, three: Ranks):
        flip(three.directory / "checkpoint-3" / "model.pt")
        self.restart(three)
        save(three, 3)
        assert [loaded["step"] for loaded in relaunch(three)] == [3, 3]
        assert torch.equal(three.load()[0]["weights"], state(3)["weights"])

    def test_damage_of_an_image_in_memory_falls_back_to_storage(self, three: Ranks):
        """Memory has no digests; but what cannot be read is excluded for all ranks."""
        self.restart(three)
        save(three, 4, storage_type=StorageType.MEMORY)
        slot = next(s for s in three.members[0]._writer.link.pin() if s)
        three.members[0]._writer.link.release()
        os.truncate(slot / "rank_1.pt", 100)
        assert [loaded["step"] for loaded in three.load()] == [3, 3]

    def test_a_tracker_that_points_nowhere_changes_nothing(self, three: Ranks):
        for text in ("77", "", "\0garbage"):
            (three.directory / "latest_checkpointed_iteration.txt").write_text(text)
            assert [loaded["step"] for loaded in self.restart(three)] == [3, 3]
            three.end()


class TestQuarantine:
    @pytest.fixture
    def three(self, ranks: Ranks) -> Ranks:
        ranks.start(2)
        save(ranks, 1, 2, 3)
        ranks.end()
        return ranks

    def load(self, ranks: Ranks, **options: Any) -> list[int]:
        ranks.start(2, **options)
        return [loaded["step"] for loaded in ranks.load()]

    def test_a_bad_checkpoint_is_quarantined_with_its_reason_and_not_tried_again(self, three: Ranks, said):
        before = metrics.counts["bad_checkpoints"]
        flip(three.directory / "checkpoint-3" / "rank_1.pt")
        assert self.load(three) == [2, 2]
        [(aside, why)] = quarantined(three)
        assert "rank_1.pt is damaged: its xxh3-128" in why and (aside / "model.pt").exists()
        assert not (three.directory / "checkpoint-3").exists()
        assert said.text.count("not resumed from step 3") == 1  # the first rank speaks for all
        assert metrics.counts["bad_checkpoints"] > before
        three.end()
        said.clear()
        assert self.load(three) == [2, 2]
        assert "not resumed" not in said.text
        assert [path for path, _ in quarantined(three)] == [aside]

    @pytest.mark.parametrize("name", ["model.pt", "manifest.json"])
    def test_a_truncated_checkpoint_is_quarantined(self, three: Ranks, said, name: str):
        os.truncate(three.directory / "checkpoint-3" / name, 10)
        assert self.load(three) == [2, 2]
        [(aside, why)] = quarantined(three)
        assert name in why and str(aside) in said.text

    def test_quarantine_of_all_checkpoints_is_no_fresh_start_at_the_next_launch(self, three: Ranks):
        flip(three.directory / "checkpoint-1" / "model.pt")
        os.truncate(three.directory / "checkpoint-2" / "rank_0.pt", 3)
        flip(three.directory / "checkpoint-3" / "manifest.json")
        for _ in range(3):
            three.start(2)
            for text in refusals(three):
                assert "model.pt is damaged" in text and "rank_0.pt has 3 bytes" in text and "manifest" in text
                assert "quarantine-*" in text
            three.end()
        assert len(quarantined(three)) == 3 and not list(three.directory.glob("checkpoint-*"))

    def test_a_checkpoint_moved_back_from_quarantine_counts_again(self, three: Ranks):
        path = three.directory / "checkpoint-3" / "rank_1.pt"
        flip(path)
        assert self.load(three) == [2, 2]
        three.end()
        [(aside, _)] = quarantined(three)
        flip(aside / "rank_1.pt")  # repaired
        aside.rename(three.directory / "checkpoint-3")
        assert self.load(three) == [3, 3]

    def test_a_checkpoint_that_is_whole_but_does_not_load_is_not_quarantined(self, three: Ranks, monkeypatch, said):
        """That may be the script's fault: what it needs is not there any more, say."""

        def refuse(path: Path, *args: Any, **options: Any) -> Any:
            if "checkpoint-3" in str(path):
                raise RuntimeError("the model has another shape")
            return load_copy(path, *args, **options)

        monkeypatch.setattr(ddp, "load_copy", refuse)
        assert self.load(three) == [2, 2]
        assert "another shape" in said.text
        assert quarantined(three) == [] and (three.directory / "checkpoint-3").exists()

    def test_what_does_not_load_is_passed_over_and_never_deleted_by_the_jobs_after(self, ranks: Ranks, said):
        strategy = ddp.KeepLatestStepStrategy(2, ranks.directory)
        ranks.start(2, deletion_strategy=strategy, weights_only=False)
        save(ranks, 1)
        opaque = state(2) | {"x": Unknown()}  # which this script may load, and the next one does not
        ranks.together(lambda member, _: member.save_checkpoint(2, opaque, storage_type=StorageType.DISK))
        ranks.end()
        kept = CheckpointDirectory(ranks.directory)
        for loaded, steps, last in ((1, (3, 4, 5), {(2, 4), (2, 5)}), (5, (6, 7, 8), {(3, 7), (3, 8)})):
            assert self.load(ranks, deletion_strategy=strategy) == [loaded] * 2
            save(ranks, *steps)
            ranks.end()
            assert {tuple(stored.id) for stored in kept.checkpoints()} == {(1, 2)} | last
        Deletion(kept)(ranks.directory / "checkpoint-2")
        assert (ranks.directory / "checkpoint-2").exists() and "was passed over at a resume" in said.text

    def test_memory_that_is_whole_but_does_not_load_is_kept(self, ranks: Ranks, monkeypatch):
        def refuse(path: Path, *args: Any, **options: Any) -> Any:
            raise RuntimeError("the model has another shape")

        ranks.start(2)
        save(ranks, 1, storage_type=StorageType.MEMORY)
        with monkeypatch.context() as patch:
            patch.setattr(ddp, "load_copy", refuse)
            assert all("another shape" in text for text in refusals(ranks))
        ranks.workers_die()
        ranks.start_workers(2)  # the script was put right
        assert [loaded["step"] for loaded in ranks.load()] == [1, 1]

    def test_a_checkpoint_that_one_other_rank_cannot_read_is_not_quarantined(self, three: Ranks, monkeypatch, said):
        """It may be that rank's mount, or its memory; but nobody resumes from it."""
        real, seen = stored_module.digest_file, []

        def rank_1_reads_other_bytes(path: Path) -> str:
            if path == three.directory / "checkpoint-3" / "rank_1.pt" and not seen:
                seen.append(path)
                return "0" * 32
            return real(path)

        monkeypatch.setattr(stored_module, "digest_file", rank_1_reads_other_bytes)
        assert self.load(three) == [2, 2]
        assert f"its xxh3-128 is {'0' * 32}" in said.text and "rank 0 finds nothing wrong with it" in said.text
        assert quarantined(three) == []

    def test_a_quarantine_that_storage_refuses_does_not_hinder_the_resume(self, three: Ranks, said):
        flip(three.directory / "checkpoint-3" / "model.pt")
        if subprocess.run(["chattr", "+i", three.directory], check=False, capture_output=True).returncode:
            pytest.skip("needs a file system and a user that can make a directory immutable")
        try:
            assert self.load(three) == [2, 2]
            assert "stays where it is: cannot quarantine" in said.text
            three.end()
        finally:
            subprocess.run(["chattr", "-i", three.directory], check=True)
        assert quarantined(three) == []

    def test_a_damaged_checkpoint_named_by_resume_path_is_not_quarantined(self, three: Ranks):
        flip(three.directory / "checkpoint-2" / "model.pt")
        three.start(2)
        with pytest.raises(BadCheckpoint, match="damaged"):
            three.load(three.directory / "checkpoint-2")
        assert quarantined(three) == [] and (three.directory / "checkpoint-2").exists()

    def test_a_step_in_memory_is_persisted_again_when_storage_was_quarantined(self, ranks: Ranks):
        ranks.start(2)
        save(ranks, 1)
        os.truncate(ranks.directory / "checkpoint-1" / "model.pt", 10)
        assert [loaded["step"] for loaded in ranks.load()] == [1, 1]
        assert {member.loaded_from for member in ranks.members} == {"memory"}
        directory = CheckpointDirectory(ranks.directory)
        until(lambda: [stored.id.step for stored in directory.checkpoints()] == [1], "step 1 on storage again")
        directory.verify(directory.checkpoints()[0])
        assert len(quarantined(ranks)) == 1


class TestHostileFiles:
    """Whatever is in place of a checkpoint, the one before is resumed."""

    @pytest.fixture
    def two(self, ranks: Ranks) -> Ranks:
        ranks.start(2)
        save(ranks, 1, 2)
        ranks.end()
        return ranks

    def falls_back(self, ranks: Ranks) -> None:
        ranks.start(2)
        assert [loaded["step"] for loaded in ranks.load()] == [1, 1]

    @pytest.mark.parametrize("name", [".", "model.pt", "rank_1.pt", "manifest.json"])
    @pytest.mark.parametrize("what", ["a loop", "a directory", "nothing at the end of a link", "a pipe", "a socket"])
    def test_a_pipe_link_or_directory_in_place_of_a_file_falls_back(self, two: Ranks, name: str, what: str):
        path = two.directory / "checkpoint-2" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        match what:
            case "a loop":
                path.symlink_to(path)
            case "a directory":
                path.mkdir()
            case "nothing at the end of a link":
                path.symlink_to("nowhere")
            case "a pipe":
                os.mkfifo(path)
            case "a socket":
                os.mknod(path, stat.S_IFSOCK | 0o600)
        self.falls_back(two)

    def test_a_manifest_with_paths_outside_the_checkpoint_is_refused(self, two: Ranks):
        path = two.directory / "checkpoint-2" / "manifest.json"
        body = json.loads(path.read_text())
        (two.directory / "outside.pt").write_bytes((two.directory / "checkpoint-2" / "model.pt").read_bytes())
        [entry] = [entry for entry in body["files"] if entry["name"] == "model.pt"]
        entry["name"] = "../outside.pt"
        del body["digest"]
        path.write_text(json.dumps({**body, "digest": manifest._digest(body)}))
        self.falls_back(two)
        [(_, why)] = quarantined(two)
        assert "../outside.pt" in why

    def test_code_in_a_pickle_is_not_run_on_load(self, two: Ranks, tmp_path: Path, said):
        """Not even in a checkpoint whose digests are right: whoever can write there can compute them."""
        files = {name: tmp_path / name for name in ("model.pt", "rank_0.pt", "rank_1.pt")}
        for name, path in files.items():
            shutil.copy(two.directory / "checkpoint-2" / name, path)
        torch.save({"weights": Exploit(tmp_path / "harm")}, files["model.pt"])
        CheckpointDirectory(two.directory).publish(PublishRequest(_later(two.directory), files, world_size=2))
        two.start(2)
        assert [loaded["step"] for loaded in two.load()] == [2, 2]
        assert "not resumed from step 9" in said.text and "rank 1: UnpicklingError" in said.text
        with pytest.raises(BadCheckpoint, match="UnpicklingError"):
            two.load(files["model.pt"])
        assert not (tmp_path / "harm").exists()
        torch.load(files["model.pt"], weights_only=False)
        assert (tmp_path / "harm").exists()  # it would have

    def test_a_directory_that_one_rank_cannot_read_is_an_error_on_all(self, two: Ranks, monkeypatch):
        scan, lock, count = CheckpointDirectory.scan, threading.Lock(), itertools.count()

        def refused_once(self: Any) -> Any:
            with lock:
                if next(count) == 0:
                    raise PersistError("cannot read checkpoints: Permission denied")
            return scan(self)

        two.start(2)
        monkeypatch.setattr(CheckpointDirectory, "scan", refused_once)
        for text in refusals(two):
            assert "cannot be searched for checkpoints: rank" in text and "Permission denied" in text

    def test_storage_that_is_gone_is_not_needed_while_memory_is_as_new(self, ranks: Ranks, monkeypatch, said):
        ranks.start(2)
        save(ranks, 1)
        save(ranks, 2, storage_type=StorageType.MEMORY)
        monkeypatch.setattr(persister, "FIRST_PAUSE", 0.01)
        shutil.rmtree(ranks.directory)
        ranks.directory.touch()
        with pytest.raises(ConfigError, match="is a file; give a directory"):
            ranks.start_workers(2)
        ranks.workers_die()
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        ranks.start_workers(2)
        assert [loaded["step"] for loaded in ranks.load()] == [2, 2]
        assert "cannot be searched for checkpoints" in said.text and "Not a directory" in said.text
        ranks.directory.unlink()  # and when it is back, it gets what it lacks
        ranks.end()
        assert [stored.id.step for stored in CheckpointDirectory(ranks.directory).checkpoints()] == [2]


class Exploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class TestVerify:
    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch):
        monkeypatch.setattr(memory_digests, "SETTLED", 0.05)

    def test_an_unknown_value_of_verify_is_refused_at_once(self, directory: Path):
        for value in ("Always", "", None, True):
            with pytest.raises(ConfigError, match="give 'never', 'resume' or 'always'"):
                ddp.DdpCheckpointer(directory, verify=value)  # type: ignore[arg-type]
        assert not directory.exists()

    def test_unlike_values_of_verify_are_refused_on_all_ranks(self, ranks: Ranks):
        ranks.start(2)
        save(ranks, 1)
        ranks.members[1]._writer.verify = "never"
        assert all("verify must be the same on all ranks" in text for text in refusals(ranks, ConfigError))

    def test_unlike_directories_are_refused_on_all_ranks(self, ranks: Ranks, tmp_path: Path):
        """Each would wait for the others' parts, and no checkpoint would ever be whole."""
        ranks.start(2)
        save(ranks, 1)
        ranks.members[1]._writer.history.directory = str(tmp_path / "rank1")
        assert all(f"and rank 1 to {tmp_path / 'rank1'}" in text for text in refusals(ranks, ConfigError))

    def test_unlike_remote_stores_are_refused_on_all_ranks(self, ranks: Ranks, tmp_path: Path):
        """They would look for checkpoints in other ways, and wait for one another."""
        ranks.start(2)
        save(ranks, 1)
        options = ranks.members[1]._writer.link.options
        ranks.members[1]._writer.link.options = dataclasses.replace(options, remote="s3://bucket/run")
        assert all("remote must be the same on all ranks" in text for text in refusals(ranks, ConfigError))

    def test_verify_never_compares_sizes_alone(self, ranks: Ranks, monkeypatch):
        ranks.start(2, verify="never")
        save(ranks, 1, 2)
        ranks.end()
        path = ranks.directory / "checkpoint-2" / "model.pt"
        flip(path)
        ranks.start(2, verify="never")
        assert [loaded["step"] for loaded in ranks.load()] == [2, 2]
        ranks.end()
        os.truncate(path, 100)
        ranks.start(2, verify="never")
        assert [loaded["step"] for loaded in ranks.load()] == [1, 1]

    def test_memory_with_digests_is_compared_with_them_on_load(self, ranks: Ranks, said):
        ranks.start(2)
        save(ranks, 1)
        save(ranks, 2, storage_type=StorageType.MEMORY)
        slot = digested(ranks, 2)
        flip(slot / "model.pt")
        assert [loaded["step"] for loaded in ranks.load()] == [1, 1]
        assert {member.loaded_from for member in ranks.members} == {"memory"}
        assert "not resumed from step 2 of history 1 in memory" in said.text and "model.pt is damaged" in said.text
        assert slots.read(slot).committed is None  # nobody is offered it again
        assert [loaded["step"] for loaded in relaunch(ranks)] == [1, 1]  # nor was it flushed

    @pytest.mark.parametrize("found", ["by the ranks", "by the persist", "by its size"])
    def test_bad_memory_is_no_fresh_start_at_any_attempt_of_a_launch(self, ranks: Ranks, monkeypatch, found: str):
        if found != "by the persist":
            monkeypatch.setenv("FASTCKPT_FLUSH", "0")
        ranks.start(2)
        save(ranks, 1, storage_type=StorageType.MEMORY)
        slot = digested(ranks, 1)
        if found == "by its size":
            os.truncate(slot / "model.pt", 64)
        else:
            flip(slot / "model.pt")
        for _ in range(3):
            ranks.workers_die()
            ranks.start_workers(2)
            until(lambda: found != "by the persist" or not slots.read(slot).committed, "the persist")
            assert all("step 1 of history 1 in memory" in text for text in refusals(ranks))
        save(ranks, 1, storage_type=StorageType.MEMORY)  # a script that starts afresh after all
        ranks.workers_die()
        ranks.start_workers(2)
        assert [loaded["step"] for loaded in ranks.load()] == [1, 1]

    def test_verify_never_does_not_compare_memory_with_its_digests(self, ranks: Ranks):
        ranks.start(2, verify="never")
        save(ranks, 1)
        flip(digested(ranks, 1) / "model.pt")  # who persisted it told the digests
        assert [loaded["step"] for loaded in ranks.load()] == [1, 1]
        assert {member.loaded_from for member in ranks.members} == {"memory"}

    def test_memory_that_changed_after_it_was_digested_never_becomes_durable(self, ranks: Ranks, said):
        ranks.start(2)
        save(ranks, 1)
        save(ranks, 2, 3, storage_type=StorageType.MEMORY)
        flip(digested(ranks, 3) / "rank_1.pt")
        ranks.workers_die()
        until(lambda: "step 3 of history 1 in memory is bad, and given up" in said.text, "step 3 was given up")
        ranks.start_workers(2)
        assert [loaded["step"] for loaded in ranks.load()] == [2, 2]
        assert ranks.members[0].wait_latest_checkpoint(60) == 2  # the one before was flushed instead
        assert sorted(path.name for path in ranks.directory.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]

    def test_an_image_of_another_size_never_becomes_durable(self, ranks: Ranks):
        ranks.start(2)
        save(ranks, 1)
        save(ranks, 2, storage_type=StorageType.MEMORY)
        os.truncate(slot_of(ranks, 2) / "rank_0.pt", 64)
        assert [loaded["step"] for loaded in relaunch(ranks)] == [1, 1]
        assert [stored.id.step for stored in CheckpointDirectory(ranks.directory).checkpoints()] == [1]

    def test_verify_always_reads_back_what_was_written(self, ranks: Ranks, monkeypatch, said):
        """A disk that stores other bytes than it was given, once: that attempt fails, the next one succeeds."""
        real, wrong = publish.digest_file, []

        def read_from_a_disk_that_lies(path: Path, **options: Any) -> str:
            if path.name == "rank_1.pt" and not wrong:
                wrong.append(path)
                flip(path)
            return real(path, **options)

        monkeypatch.setattr(publish, "digest_file", read_from_a_disk_that_lies)
        monkeypatch.setattr(persister, "FIRST_PAUSE", 0.01)
        ranks.start(2, verify="always")
        save(ranks, 1)
        assert "reads back otherwise" in said.text and len(wrong) == 1
        assert [loaded["step"] for loaded in relaunch(ranks)] == [1, 1]

    def test_verify_resume_does_not_read_back_what_was_written(self, ranks: Ranks, monkeypatch):
        monkeypatch.setattr(publish, "digest_file", None)
        ranks.start(2)
        save(ranks, 1)


class TestRollback:
    """A script passes its resume_path at each start, also when the agent has restarted it."""

    @pytest.fixture
    def old(self, ranks: Ranks) -> Path:
        """Steps 50 to 100 of an earlier launch."""
        ranks.start(2)
        save(ranks, 50, 60, 100)
        ranks.end()
        return ranks.directory / "checkpoint-50"

    def steps(self, ranks: Ranks, path: Any = "") -> set[tuple[int, str]]:
        ranks.load(path)
        return {(member.loaded_step, member.loaded_from) for member in ranks.members}

    def restart(self, ranks: Ranks) -> None:
        ranks.workers_die()
        ranks.start_workers(2)

    def test_workers_restarted_after_a_rollback_resume_the_new_history(self, ranks: Ranks, old: Path):
        ranks.start(2)
        assert self.steps(ranks, old) == {(50, "storage")}
        self.restart(ranks)
        assert self.steps(ranks, old) == {(50, "storage")}  # nothing was saved since
        save(ranks, 52)
        save(ranks, 55, storage_type=StorageType.MEMORY)
        for step in (55, 57):  # again and again
            self.restart(ranks)
            assert self.steps(ranks, old) == {(step, "memory")}
            save(ranks, 57, storage_type=StorageType.MEMORY)
        ranks.workers_die()
        shutil.rmtree(old)  # as retention may do meanwhile
        ranks.start_workers(2)
        assert self.steps(ranks, old) == {(57, "memory")}

    def test_after_a_rollback_bad_memory_falls_back_to_storage_then_to_the_path(self, ranks: Ranks, old: Path):
        ranks.start(2)
        ranks.load(old)
        save(ranks, 52)
        flip(digested(ranks, 52) / "model.pt")
        self.restart(ranks)
        assert self.steps(ranks, old) == {(52, "storage")}
        flip(ranks.directory / "checkpoint-52" / "model.pt")
        self.restart(ranks)
        assert self.steps(ranks, old) == {(50, "storage")}
        assert len(quarantined(ranks)) == 1

    def test_a_new_launch_with_a_rollback_path_goes_back_to_it(self, ranks: Ranks, old: Path):
        ranks.start(2)
        ranks.load(old)
        save(ranks, 55)
        ranks.end()
        ranks.start(2)
        assert self.steps(ranks, old) == {(50, "storage")}
        ranks.end()
        ranks.start(2)
        assert self.steps(ranks) == {(55, "storage")}  # without a path, the newest history

    def test_a_second_rollback_in_the_same_process_is_a_new_rollback(self, ranks: Ranks, old: Path):
        ranks.start(2)
        ranks.load(old)
        save(ranks, 55, storage_type=StorageType.MEMORY)
        assert self.steps(ranks, old) == {(50, "storage")}
        save(ranks, 53, storage_type=StorageType.MEMORY)
        self.restart(ranks)
        assert self.steps(ranks, old) == {(53, "memory")}  # of the newer history

    def test_a_load_with_another_path_is_another_rollback(self, ranks: Ranks, old: Path):
        ranks.start(2)
        ranks.load(old)
        save(ranks, 55, storage_type=StorageType.MEMORY)
        self.restart(ranks)
        assert self.steps(ranks, ranks.directory / "checkpoint-60") == {(60, "storage")}

    def test_saves_after_a_load_without_a_path_belong_to_no_rollback(self, ranks: Ranks, old: Path):
        ranks.start(2)
        ranks.load()
        save(ranks, 101, storage_type=StorageType.MEMORY)
        self.restart(ranks)
        assert self.steps(ranks, old) == {(50, "storage")}

    def test_a_rollback_changes_nothing_before_its_first_save(self, ranks: Ranks, old: Path):
        ranks.start(2)
        ranks.load(old)
        assert [loaded["step"] for loaded in relaunch(ranks)] == [100, 100]

    def test_retention_after_a_rollback_deletes_the_old_history_first(self, ranks: Ranks, old: Path):
        strategy = ddp.KeepLatestStepStrategy(2, str(ranks.directory))
        ranks.start(2, deletion_strategy=strategy)
        ranks.load(old)
        directory = CheckpointDirectory(ranks.directory)
        for step, kept in ((51, {(1, 100), (2, 51)}), (52, {(2, 51), (2, 52)}), (53, {(2, 52), (2, 53)})):
            save(ranks, step)
            until(lambda kept=kept: {tuple(s.id) for s in directory.checkpoints()} == kept, f"only {kept}")

    @pytest.mark.parametrize("path", ["", "{step}.pt", "always-the-same.pt"])
    def test_steps_saved_again_after_a_rollback_have_the_bytes_of_the_new_history(
        self, ranks: Ranks, tmp_path: Path, path: str
    ):
        def save_all(history: int, *steps: int) -> None:
            for step in steps:
                for rank, member in enumerate(ranks.members):
                    user = str(tmp_path / path.format(step=step)) if path else ""
                    assert member.save_checkpoint(step, state(step + history / 2), user, DISK, {"of": [history, rank]})
                ranks.members[0].wait_latest_checkpoint(60)

        ranks.start(2)
        save_all(1, 50, 52, 54)
        newest = CheckpointDirectory(ranks.directory).checkpoints()[0]
        first = next(
            (s.path for s in CheckpointDirectory(ranks.directory).checkpoints() if s.id.step == 50), newest.path
        )
        ranks.load(first)
        save_all(2, 52, 54)
        assert [loaded["weights"][0] for loaded in relaunch(ranks)] == [55.0, 55.0]
        for stored in CheckpointDirectory(ranks.directory).checkpoints():
            stored.verify()
            history, step = stored.id
            assert torch.load(stored.path_of("model.pt"))["weights"][0] == step + history / 2
            own = [torch.load(stored.path_of(f"rank_{rank}.pt"))["state"]["of"] for rank in (0, 1)]
            assert own == [[history, 0], [history, 1]]


def quarantined(ranks: Ranks) -> list[tuple[Path, str]]:
    return CheckpointDirectory(ranks.directory).scan().quarantined


def slot_of(ranks: Ranks, step: int) -> Path:
    arena = ranks.members[0]._writer.link.arena
    found = {save.step: slot for slot in arena.glob("slot-*") if (save := slots.read(slot).committed)}
    return found[step]


def digested(ranks: Ranks, step: int) -> Path:
    """The slot of a step, once the saver has digested all that is in it."""
    slot = slot_of(ranks, step)
    until(lambda: (r := slots.read(slot)).digests.keys() == r.files.keys(), f"digests of step {step}")
    return slot


def refusals(ranks: Ranks, kind: type[Exception] = NoLoadableCheckpoint) -> list[str]:
    """What each rank is told that cannot load."""

    def refused(member: Any, rank: int) -> str:
        with pytest.raises(kind) as info:
            member.load_checkpoint()
        return str(info.value)

    return ranks.together(refused)


def _mapped_in_arena(tensor: torch.Tensor) -> bool:
    arenas = arena_path(os.environ["FASTCKPT_SHM_DIR"], "", 0).parent
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(arenas) in line:
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            if low <= tensor.data_ptr() < high:
                return True
    return False


def _later(directory: Path) -> Any:
    newest = CheckpointDirectory(directory).checkpoints()[0].id
    return newest._replace(step=9)


def _files(place: Path) -> dict[str, Path]:
    return {path.name: path for path in place.glob("*.pt")}


def test_the_check_for_aliases_of_shared_memory_finds_one(tmp_path: Path):
    """The check used above sees a tensor that does alias a file in shared memory."""
    path = Path(os.environ["FASTCKPT_SHM_DIR"]) / "file"
    path.write_bytes(bytes(4096))
    tensor = torch.from_file(str(path), shared=True, size=1024)
    assert _mapped_in_arena(tensor)
    assert ctypes.c_char.from_address(tensor.data_ptr()).value == b"\0"
    del tensor
    path.unlink()
