"""What load_checkpoint returns, whence, and what it does with damaged checkpoints."""

import ctypes
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastckpt import ddp
from fastckpt.ddp import StorageType, settle
from fastckpt.engine.load import load_copy
from fastckpt.errors import BadCheckpoint, NoLoadableCheckpoint
from fastckpt.memory.arena import arena_path
from fastckpt.storage.directory import CheckpointDirectory
from tests.ddp.conftest import Ranks, state

DISK = StorageType.DISK


def save(ranks: Ranks, *steps: int, storage_type: StorageType = DISK) -> None:
    """All ranks save these steps, and wait until they are durable."""
    for step in steps:
        for rank, member in enumerate(ranks.members):
            own = {"position": 100 * step + rank}
            assert member.save_checkpoint(step, state(step), storage_type=storage_type, rank_state=own)
        if storage_type is DISK:
            assert ranks.members[0].wait_latest_checkpoint(60) == step


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


class TestWhatComesBack:
    def test_nothing_was_ever_saved(self, ranks: Ranks):
        (one,) = ranks.start()
        assert one.load_checkpoint() == {}
        assert (one.loaded_step, one.loaded_from, one.rank_state) == (-1, "", {})

    def test_from_memory_each_rank_has_its_own(self, ranks: Ranks):
        ranks.start(2)
        save(ranks, 3, storage_type=StorageType.MEMORY)
        ranks.workers_die()
        ranks.start_workers(2)
        assert [loaded["step"] for loaded in ranks.load()] == [3, 3]
        assert [member.rank_state for member in ranks.members] == [{"position": 300}, {"position": 301}]
        assert {(member.loaded_step, member.loaded_from) for member in ranks.members} == {(3, "memory")}

    def test_random_numbers_go_on(self, ranks: Ranks):
        (one,) = ranks.start()
        torch.manual_seed(1)
        one.save_checkpoint(1, state(1))
        expected = torch.rand(3)
        torch.manual_seed(2)
        one.load_checkpoint()
        assert torch.equal(torch.rand(3), expected)

    def test_does_not_alias_shared_memory(self, ranks: Ranks):
        (one,) = ranks.start()
        one.save_checkpoint(1, state(1, 70_000))
        loaded = one.load_checkpoint()
        for step in range(2, 8):  # each slot is written to
            one.save_checkpoint(step, state(step, 70_000))
        assert torch.equal(loaded["weights"], state(1, 70_000)["weights"])
        assert not _mapped_in_arena(loaded["weights"])

    def test_two_ranks_that_train_on_do_not_see_each_other(self, ranks: Ranks):
        """optimizer.load_state_dict keeps the tensors it is given; as views of an image ranks would share them."""
        ranks.start(2)
        model = nn.Linear(300, 300)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        for member in ranks.members:
            member.save_checkpoint(1, whole)
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

    def test_tensors_are_aligned_and_share_what_they_shared(self, ranks: Ranks):
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
        one.save_checkpoint(1, whole)
        loaded = one.load_checkpoint()
        for name, tensor in whole.items():
            assert torch.equal(loaded[name], tensor), name
            assert (loaded[name].dtype, loaded[name].stride()) == (tensor.dtype, tensor.stride())
            assert loaded[name].untyped_storage().data_ptr() % 64 == 0
        loaded["shared"][15] = -1
        assert (loaded["same"][15], loaded["view"][5], loaded["columns"][15, 0]) == (-1, -1, -1)
        assert loaded["view"].untyped_storage().nbytes() == shared.untyped_storage().nbytes()

    def test_another_number_of_threads_is_warned_about(self, ranks: Ranks, said):
        (one,) = ranks.start()
        before = torch.get_num_threads()
        one.save_checkpoint(1, state(1))
        try:
            one.load_checkpoint()
            assert "OMP_NUM_THREADS" not in said.text
            torch.set_num_threads(before + 1)
            one.load_checkpoint()
        finally:
            torch.set_num_threads(before)
        assert f"OMP_NUM_THREADS={before}" in said.text

    def test_settle_leaves_no_trace(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        random_state = torch.get_rng_state()
        settle(model, lambda: model(torch.randn(4, 3)).sum().backward())
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.equal(torch.get_rng_state(), random_state)


class TestTiers:
    def test_after_a_good_end_it_is_the_last_flush(self, ranks: Ranks, directory: Path):
        ranks.start(2)
        save(ranks, 1)
        save(ranks, 2, 3, storage_type=StorageType.MEMORY)
        arena = ranks.members[0]._writer.link.arena
        assert [loaded["step"] for loaded in relaunch(ranks)] == [3, 3]
        assert {member.loaded_from for member in ranks.members} == {"storage"}
        assert [member.rank_state for member in ranks.members] == [{"position": 300}, {"position": 301}]
        ranks.end()
        assert not arena.exists()

    def test_without_flush_it_is_the_last_persisted(self, ranks: Ranks, monkeypatch):
        monkeypatch.setenv("FASTCKPT_FLUSH", "no")
        ranks.start(2)
        save(ranks, 1)
        save(ranks, 2, storage_type=StorageType.MEMORY)
        assert [loaded["step"] for loaded in relaunch(ranks)] == [1, 1]

    def test_storage_that_is_newer_than_memory_wins(self, ranks: Ranks, directory: Path):
        """Another job on another host may have gone on meanwhile; here it is made from a copy."""
        ranks.start(1)
        save(ranks, 5)
        CheckpointDirectory(directory).publish(_later(directory), _files(directory / "checkpoint-5"))
        (loaded,) = ranks.load()
        assert loaded["step"] == 5
        assert (ranks.members[0].loaded_step, ranks.members[0].loaded_from) == (9, "storage")

    @pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
    def test_another_number_of_ranks_loads(self, ranks: Ranks, said, before: int, after: int):
        ranks.start(before)
        save(ranks, 4)
        assert [loaded["step"] for loaded in relaunch(ranks, after)] == [4] * after
        assert [member.rank_state for member in ranks.members] == [{"position": 400}, {}][:after]
        assert ("rank 1 has no state of its own" in said.text) == (after > before)

    def test_without_memory_it_is_the_newest_on_storage(self, ranks: Ranks):
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
    def test_a_checkpoint_by_its_directory(self, ranks: Ranks, directory: Path):
        ranks.start(2)
        save(ranks, 1, 2)
        for path in (directory / "checkpoint-1", directory / "checkpoint-1" / "model.pt"):
            assert [loaded["step"] for loaded in ranks.load(path)] == [1, 1]
            assert [member.rank_state["position"] for member in ranks.members] == [100, 101]
            assert {(member.loaded_step, member.loaded_from) for member in ranks.members} == {(1, "storage")}

    def test_a_relative_one(self, ranks: Ranks, directory: Path, monkeypatch):
        ranks.start()
        save(ranks, 1, 2)
        monkeypatch.chdir(directory)
        assert ranks.load("checkpoint-1")[0]["step"] == 1

    def test_a_file_that_anybody_wrote(self, ranks: Ranks, tmp_path: Path, said):
        ranks.start(2)
        torch.save({"anything": torch.ones(3)}, tmp_path / "theirs.pt")
        assert all(torch.equal(loaded["anything"], torch.ones(3)) for loaded in ranks.load(tmp_path / "theirs.pt"))
        assert "has no state of its own" in said.text

    def test_a_file_that_this_job_wrote_under_a_name_of_its_user(self, ranks: Ranks, tmp_path: Path):
        (one,) = ranks.start()
        one.save_checkpoint(6, state(6), tmp_path / "mine.pt", DISK, {"position": 6})
        one.wait_latest_checkpoint(60)
        assert one.load_checkpoint(tmp_path / "mine.pt")["step"] == 6
        assert one.rank_state == {"position": 6}

    def test_a_missing_one_is_told_to_all(self, ranks: Ranks, tmp_path: Path):
        ranks.start(2)
        save(ranks, 1)

        def refused(member: Any, rank: int) -> str:
            with pytest.raises(BadCheckpoint, match=r"nowhere\.pt cannot be loaded: rank 0: .*; rank 1: "):
                member.load_checkpoint(tmp_path / "nowhere.pt")
            return "refused"

        assert ranks.together(refused) == ["refused"] * 2

    def test_a_damaged_one_is_refused_and_nothing_else_taken(self, ranks: Ranks, directory: Path):
        ranks.start(2)
        save(ranks, 1, 2)
        flip(directory / "checkpoint-2" / "model.pt")

        def refused(member: Any, rank: int) -> str:
            with pytest.raises(BadCheckpoint, match=r"rank 0: .*damaged"):
                member.load_checkpoint(directory / "checkpoint-2")
            return "refused"

        assert ranks.together(refused) == ["refused"] * 2

    @pytest.mark.parametrize("pickled", [b"\x80\x02.", b"\x80\x02X\x01\x00\x00\x00aX\x01\x00\x00\x00bb."])
    def test_a_file_that_torch_cannot_read_is_told_to_all(self, ranks: Ranks, tmp_path: Path, pickled: bytes):
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

    def test_opens_a_history_in_which_smaller_steps_are_newest(self, ranks: Ranks, directory: Path):
        ranks.start(2)
        save(ranks, 1, 2, 8)
        assert [loaded["step"] for loaded in ranks.load(directory / "checkpoint-2")] == [2, 2]
        save(ranks, 3)
        assert [loaded["step"] for loaded in ranks.load()] == [3, 3]
        assert [loaded["step"] for loaded in relaunch(ranks)] == [3, 3]
        newest = CheckpointDirectory(directory).checkpoints()[0]
        assert newest.id.step == 3
        assert newest.manifest.parent is not None and newest.manifest.parent.step == 2

    def test_at_the_start_of_a_job_does_so_too(self, ranks: Ranks, directory: Path):
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
    def test_the_newest_falls_back_to_the_one_before_on_all_ranks(self, three: Ranks, name: str, how: str):
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

    def test_two_in_a_row_fall_back_twice(self, three: Ranks, said):
        flip(three.directory / "checkpoint-3" / "model.pt")
        flip(three.directory / "checkpoint-2" / "rank_1.pt")
        assert [loaded["step"] for loaded in self.restart(three)] == [1, 1]
        assert "not resumed from step 3" in said.text and "not resumed from step 2" in said.text

    def test_all_bad_is_no_fresh_start(self, three: Ranks):
        for step, name in ((1, "model.pt"), (2, "rank_0.pt"), (3, "rank_1.pt")):
            flip(three.directory / f"checkpoint-{step}" / name)
        self.refuses_a_fresh_start(three)

    def test_all_truncated_is_no_fresh_start(self, three: Ranks):
        for step in (1, 2, 3):
            os.truncate(three.directory / f"checkpoint-{step}" / "model.pt", 10)
        self.refuses_a_fresh_start(three)

    def test_all_manifests_gone_bad_is_no_fresh_start(self, three: Ranks):
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

    def test_after_it_the_job_saves_on(self, three: Ranks):
        flip(three.directory / "checkpoint-3" / "model.pt")
        self.restart(three)
        save(three, 3)
        assert [loaded["step"] for loaded in relaunch(three)] == [3, 3]
        assert torch.equal(three.load()[0]["weights"], state(3)["weights"])

    def test_of_an_image_in_memory_falls_back_to_storage(self, three: Ranks):
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


def test_mapped_in_arena_tells_true(tmp_path: Path):
    """The check used above sees a tensor that does alias a file in shared memory."""
    path = Path(os.environ["FASTCKPT_SHM_DIR"]) / "file"
    path.write_bytes(bytes(4096))
    tensor = torch.from_file(str(path), shared=True, size=1024)
    assert _mapped_in_arena(tensor)
    assert ctypes.c_char.from_address(tensor.data_ptr()).value == b"\0"
    del tensor
    path.unlink()
