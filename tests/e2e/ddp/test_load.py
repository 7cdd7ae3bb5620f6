"""load_checkpoint: the state it returns, its tier, and damaged checkpoints."""

import dataclasses
import itertools
import os
import re
import shutil
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastckpt import ddp
from fastckpt._core import metrics
from fastckpt._core.memory import slots
from fastckpt._core.resume.load import load_copy
from fastckpt._core.retention import Deletion
from fastckpt._core.saver import memory_digests
from fastckpt._core.saver.persistence import persister
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local import publish
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.ddp import StorageType, settle
from fastckpt.errors import BadCheckpoint, ConfigError, PersistError
from tests.e2e.ddp.conftest import Ranks, flip, on_storage, state, until

DISK, MEMORY = StorageType.DISK, StorageType.MEMORY


def save(ranks: Ranks, *steps: int, storage_type: StorageType = DISK) -> None:
    """All ranks save these steps, and wait until they are durable."""
    for step in steps:
        for rank, member in enumerate(ranks.members):
            own = {"position": 100 * step + rank}
            assert member.save_checkpoint(step, state(step), storage_type=storage_type, rank_state=own)
        if storage_type is DISK:
            assert ranks.members[0].wait_latest_checkpoint(60) == step


def positions(ranks: Ranks) -> list[Any]:
    return [member.rank_state.get("position") for member in ranks.members]


def relaunch(ranks: Ranks, world: int = 2) -> list[int]:
    """End the job, memory included; start it again and load."""
    ranks.end()
    ranks.start(world)
    return [step for step, _ in ranks.resume()]


@pytest.fixture
def three(ranks: Ranks) -> Ranks:
    """A job that has ended, with three steps on storage."""
    ranks.start(2)
    save(ranks, 1, 2, 3)
    ranks.end()
    return ranks


def quarantined(ranks: Ranks) -> list[tuple[Path, str]]:
    return CheckpointDirectory(ranks.directory).scan().quarantined


def digested(ranks: Ranks, step: int) -> Path:
    """The slot of a step, once the saver has digested all that is in it."""
    slot = ranks.slot_of(step)
    until(lambda: (r := slots.read(slot)).digests.keys() == r.files.keys(), f"digests of step {step}")
    return slot


def later(directory: Path, files: dict[str, Path], world: int = 1) -> None:
    """Another job on another host has gone on, and saved step 9."""
    newest = CheckpointDirectory(directory).checkpoints()[0].id
    CheckpointDirectory(directory).publish(PublishRequest(newest._replace(step=9), files, world_size=world))


class TestLoadedState:
    def test_a_load_from_memory_gives_each_rank_its_own_state_and_random_numbers(self, ranks):
        """optimizer.load_state_dict keeps the tensors it is given; as views of an image ranks would share them."""
        ranks.start(2)
        torch.manual_seed(1)
        save(ranks, 3, storage_type=MEMORY)
        expected = torch.rand(3)
        ranks.workers_die()
        ranks.start_workers(2)
        assert ranks.resume() == [(3, "memory")] * 2
        assert positions(ranks) == [300, 301]
        first, second = ranks.load()
        first["weights"].fill_(7)
        assert torch.equal(second["weights"], state(3)["weights"])
        assert torch.equal(ranks.load()[0]["weights"], state(3)["weights"])
        for step in range(4, 10):  # each slot is written to
            save(ranks, step, storage_type=MEMORY)
            torch.manual_seed(1)
        assert torch.equal(second["weights"], state(3)["weights"])
        ranks.end()
        (one,) = ranks.start()
        torch.manual_seed(2)
        one.load_checkpoint()
        assert torch.equal(torch.rand(3), expected)

    def test_loaded_tensors_are_aligned_and_share_storages_as_before(self, ranks):
        (one,) = ranks.start()
        shared = torch.arange(1000.0)
        odd = {f"odd {size}": torch.ones(size, dtype=torch.uint8) for size in (1, 63, 65, 4097)}
        columns, empty = shared.view(10, 100).t(), torch.empty(0, 3)
        whole = odd | {"shared": shared, "same": shared, "view": shared[10:20], "columns": columns, "empty": empty}
        one.save_checkpoint(1, whole, storage_type=MEMORY)
        loaded = one.load_checkpoint()
        for name, tensor in whole.items():
            assert torch.equal(loaded[name], tensor), name
            assert loaded[name].stride() == tensor.stride()
            assert loaded[name].untyped_storage().data_ptr() % 64 == 0
        loaded["shared"][15] = -1
        assert (loaded["same"][15], loaded["view"][5], loaded["columns"][15, 0]) == (-1, -1, -1)
        assert loaded["view"].untyped_storage().nbytes() == shared.untyped_storage().nbytes()

    def test_a_load_with_another_number_of_threads_warns(self, ranks, said):
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
    def test_a_load_prefers_storage_that_is_newer_than_memory(self, ranks, directory):
        (one,) = ranks.start(1)
        save(ranks, 5)
        later(directory, {path.name: path for path in (directory / "checkpoint-5").glob("*.pt")})
        assert one.load_checkpoint()["step"] == 5 and (one.loaded_step, one.loaded_from) == (9, "storage")

    @pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
    def test_a_load_with_another_number_of_ranks_succeeds(self, ranks, said, before, after):
        ranks.start(before)
        save(ranks, 4)
        assert relaunch(ranks, after) == [4] * after
        assert positions(ranks) == [400, None][:after]
        assert ("rank 1 has no state of its own" in said.text) == (after > before)
        if after > before:
            with pytest.raises(KeyError, match=r"rank_state has no 'position'.* rank 1 has nothing"):
                ranks.members[1].rank_state["position"]


class TestResumePath:
    def test_resume_path_accepts_a_checkpoint_by_directory_and_files_of_torch_save_or_at_a_path_of_the_user(
        self, ranks, tmp_path, monkeypatch, said
    ):
        ranks.start(2)
        save(ranks, 1, 2)
        monkeypatch.chdir(ranks.directory)
        for path in (ranks.directory / "checkpoint-1/model.pt", "checkpoint-1"):
            assert ranks.resume(path) == [(1, "storage")] * 2
            assert positions(ranks) == [100, 101]
        torch.save({"anything": torch.ones(3)}, tmp_path / "theirs.pt")
        assert all(torch.equal(loaded["anything"], torch.ones(3)) for loaded in ranks.load(tmp_path / "theirs.pt"))
        assert "has no state of its own" in said.text
        for rank, member in enumerate(ranks.members):
            member.save_checkpoint(6, state(6), tmp_path / "mine.pt", DISK, {"position": rank})
        ranks.members[0].wait_latest_checkpoint(60)
        assert [loaded["step"] for loaded in ranks.load(tmp_path / "mine.pt")] == [6, 6]
        assert positions(ranks) == [0, 1]

    def test_a_resume_path_that_does_not_load_is_an_error_on_all_ranks(self, ranks, tmp_path):
        """A file of torch.save whose pickle is another: torch raises AttributeError, of a name that is a text."""
        torch.save(state(1), tmp_path / "whole.pt")
        with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "bad.pt", "w") as bad:
            for name in whole.namelist():
                is_pickle = name.endswith("data.pkl")
                pickled = b"\x80\x02X\x01\x00\x00\x00aX\x01\x00\x00\x00bb."
                bad.writestr(name, pickled if is_pickle else whole.read(name))
        ranks.start(2)
        save(ranks, 1)
        first, second = ranks.refusals(BadCheckpoint, tmp_path / "bad.pt")
        assert first == second and re.search("(?s)rank 0: .*; rank 1: ", first)

    def test_a_resume_path_of_another_run_is_compared_with_its_manifest(self, three, tmp_path):
        other = tmp_path / "other" / "checkpoint-1"
        shutil.move(three.directory, other.parent)
        three.start(2)
        for path in (other, f"file://{other}/model.pt"):
            assert three.resume(path) == [(1, "storage")] * 2
            assert positions(three) == [100, 101]
        flip(other / "model.pt", 3000)  # an element of a tensor
        for path in (other, other / "model.pt"):
            assert all("model.pt is damaged" in text for text in three.refusals(BadCheckpoint, path))
        assert CheckpointDirectory(other.parent).scan().quarantined == []

    def test_a_resume_path_whose_checkpoint_does_not_count_is_refused(self, ranks, tmp_path):
        """Also at the next attempt, when it was quarantined and the file that its user named is still there."""
        mine = tmp_path / "mine.pt"
        ranks.start(2)
        for member in ranks.members:
            member.save_checkpoint(1, state(1), mine, DISK)
        ranks.members[0].wait_latest_checkpoint(60)
        save(ranks, 2)
        ranks.end()
        (ranks.directory / "checkpoint-1/rank_1.pt").unlink()
        for _ in range(2):
            ranks.start(2)
            assert all("is not there" in text for text in ranks.refusals(BadCheckpoint, mine))
            ranks.end()


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


class TestQuarantine:
    def test_damage_of_all_checkpoints_is_no_fresh_start_at_any_launch(self, three):
        flip(three.directory / "checkpoint-1" / "model.pt")
        os.truncate(three.directory / "checkpoint-2" / "rank_0.pt", 3)
        (three.directory / "checkpoint-3" / "manifest.json").write_text("{}")
        for _ in range(2):
            three.start(2)
            first, second = three.refusals()
            assert first == second
            assert "holds checkpoints, but none that all ranks can load" in first and "quarantine-*" in first
            assert "model.pt is damaged" in first and "rank_0.pt has 3 bytes" in first and "manifest" in first
            three.end()
        assert len(quarantined(three)) == 3 and not list(three.directory.glob("checkpoint-*"))

    def load(self, ranks: Ranks, **options: Any) -> list[int]:
        ranks.start(2, **options)
        return [loaded["step"] for loaded in ranks.load()]

    def test_a_bad_checkpoint_is_quarantined_with_its_reason_and_neither_read_nor_tried_again(
        self, three, monkeypatch, said
    ):
        """torch.load of damaged bytes may abort the process: all verify before any loads."""
        read: list[str] = []

        def noted(path: Path, *args: Any, **options: Any) -> Any:
            read.append(path.parent.name)
            return load_copy(path, *args, **options)

        monkeypatch.setattr(ddp, "load_copy", noted)
        before = metrics.counts["bad_checkpoints"]
        flip(three.directory / "checkpoint-3" / "rank_1.pt")
        flip(three.directory / "checkpoint-2" / "model.pt")
        assert self.load(three) == [1, 1] and positions(three) == [100, 101]
        assert read == ["checkpoint-1"] * 4
        [(aside, why)] = [found for found in quarantined(three) if "rank_1.pt" in found[1]]
        assert "rank_1.pt is damaged: its xxh3-128" in why and (aside / "model.pt").exists()
        assert not (three.directory / "checkpoint-3").exists()
        for step in (2, 3):  # the first rank speaks for all
            assert said.text.count(f"not resumed from step {step}") == 1
        assert metrics.counts["bad_checkpoints"] > before
        said.clear()
        assert relaunch(three) == [1, 1]
        assert "not resumed" not in said.text and len(quarantined(three)) == 2
        save(three, 4)
        three.end()
        pipe(three.directory / "checkpoint-4" / "rank_1.pt")
        assert self.load(three) == [1, 1]

    def test_a_checkpoint_that_is_whole_but_does_not_load_is_not_quarantined(self, three, monkeypatch, said):
        """That may be the script's fault: what it needs is not there any more, say. The same holds of memory."""

        def refuse(path: Path, *args: Any, **options: Any) -> Any:
            if "checkpoint-3" in str(path) or "slot-" in str(path):
                raise RuntimeError("the model has another shape")
            return load_copy(path, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(ddp, "load_copy", refuse)
            assert self.load(three) == [2, 2]
            assert "another shape" in said.text
            assert quarantined(three) == [] and (three.directory / "checkpoint-3").exists()
            save(three, 4, storage_type=MEMORY)
            assert [step for step, _ in three.resume()] == [2, 2]
        three.workers_die()
        three.start_workers(2)  # the script was put right
        assert three.resume() == [(4, "memory")] * 2

    def test_what_does_not_load_is_passed_over_and_never_deleted_by_the_jobs_after(self, ranks, said):
        strategy = ddp.KeepLatestStepStrategy(2, ranks.directory)
        ranks.start(2, deletion_strategy=strategy, weights_only=False)
        save(ranks, 1)
        opaque = state(2) | {"x": nn.Identity()}  # which this script may load, and the next one does not
        ranks.together(lambda member, _: member.save_checkpoint(2, opaque, storage_type=DISK))
        ranks.end()
        kept = CheckpointDirectory(ranks.directory)
        for loaded, steps, last in ((1, (3, 4, 5), {(2, 4), (2, 5)}), (5, (6, 7, 8), {(3, 7), (3, 8)})):
            assert self.load(ranks, deletion_strategy=strategy) == [loaded] * 2
            save(ranks, *steps)
            ranks.end()
            assert {tuple(stored.id) for stored in kept.checkpoints()} == {(1, 2)} | last
        Deletion(kept)(ranks.directory / "checkpoint-2")
        assert (ranks.directory / "checkpoint-2").exists() and "was passed over at a resume" in said.text

    def test_a_quarantine_that_storage_refuses_does_not_hinder_the_resume(self, three, monkeypatch, said):
        def refuse(*_: Any) -> Any:
            raise PersistError("cannot quarantine: the file system is read-only")

        monkeypatch.setattr(CheckpointDirectory, "quarantine", refuse)
        flip(three.directory / "checkpoint-3" / "model.pt")
        assert self.load(three) == [2, 2]
        assert "stays where it is: cannot quarantine" in said.text

    def test_a_step_in_memory_is_persisted_again_when_storage_was_quarantined(self, ranks):
        ranks.start(2)
        save(ranks, 1)
        os.truncate(ranks.directory / "checkpoint-1" / "model.pt", 10)
        assert ranks.resume() == [(1, "memory")] * 2
        until(lambda: on_storage(ranks.directory) == [1], "step 1 on storage again")
        directory = CheckpointDirectory(ranks.directory)
        directory.verify(directory.checkpoints()[0])
        assert len(quarantined(ranks)) == 1


class Exploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class TestHostileFiles:
    def test_code_in_a_pickle_is_not_run_on_load(self, three, tmp_path, said):
        """Not even in a checkpoint whose digests are right: whoever can write there can compute them."""
        files = {name: tmp_path / name for name in ("model.pt", "rank_0.pt", "rank_1.pt")}
        for name, path in files.items():
            shutil.copy(three.directory / "checkpoint-2" / name, path)
        torch.save({"weights": Exploit(tmp_path / "harm")}, files["model.pt"])
        later(three.directory, files, world=2)
        three.start(2)
        assert three.resume() == [(3, "storage")] * 2
        assert "not resumed from step 9" in said.text and "rank 1: UnpicklingError" in said.text
        assert all("UnpicklingError" in text for text in three.refusals(BadCheckpoint, files["model.pt"]))
        assert not (tmp_path / "harm").exists()
        torch.load(files["model.pt"], weights_only=False)
        assert (tmp_path / "harm").exists()  # it would have

    def test_a_directory_that_one_rank_cannot_read_is_an_error_on_all(self, three, monkeypatch):
        scan, lock, count = CheckpointDirectory.scan, threading.Lock(), itertools.count()

        def refused_once(self: Any) -> Any:
            with lock:
                if next(count) == 0:
                    raise PersistError("cannot read checkpoints: Permission denied")
            return scan(self)

        three.start(2)
        monkeypatch.setattr(CheckpointDirectory, "scan", refused_once)
        for text in three.refusals():
            assert "cannot be searched for checkpoints: rank" in text and "Permission denied" in text

    def test_storage_that_is_gone_is_not_needed_while_memory_is_as_new(self, ranks, monkeypatch, said):
        ranks.start(2)
        save(ranks, 1)
        save(ranks, 2, storage_type=MEMORY)
        monkeypatch.setattr(persister, "FIRST_PAUSE", 0.01)
        shutil.rmtree(ranks.directory)
        ranks.directory.touch()
        with pytest.raises(ConfigError, match="is a file; give a directory"):
            ranks.start_workers(2)
        ranks.workers_die()
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        ranks.start_workers(2)
        assert ranks.resume() == [(2, "memory")] * 2
        assert "cannot be searched for checkpoints" in said.text and "Not a directory" in said.text
        ranks.directory.unlink()  # and when it is back, it gets what it lacks
        ranks.end()
        assert on_storage(ranks.directory) == [2]


class TestVerify:
    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch):
        monkeypatch.setattr(memory_digests, "SETTLED", 0.05)

    def test_unlike_options_of_ranks_are_refused_on_all_ranks(self, ranks, monkeypatch):
        """Of unlike directories each would wait for the others' parts, and no checkpoint would ever be whole."""
        ranks.start(2)
        save(ranks, 1)
        session = ranks.members[1]._writer
        options = dataclasses.replace(session.link.options, remote="s3://bucket/run")
        for holder, name, other, says in (
            (session, "verify", "never", "verify must be the same on all ranks"),
            (session.history, "directory", "/tmp/rank1", "and rank 1 to /tmp/rank1"),
            (session.link, "options", options, "remote must"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(holder, name, other)
                assert all(says in text for text in ranks.refusals(ConfigError))

    def test_verify_never_compares_sizes_alone(self, ranks):
        ranks.start(2, verify="never")
        save(ranks, 1, 2)
        flip(digested(ranks, 2) / "model.pt")  # who persisted it told the digests
        assert ranks.resume() == [(2, "memory")] * 2
        path = ranks.directory / "checkpoint-2" / "model.pt"
        for harm, step in ((flip, 2), (halve, 1)):
            ranks.end()
            harm(path)
            ranks.start(2, verify="never")
            assert ranks.resume() == [(step, "storage")] * 2

    @pytest.mark.parametrize(("harm", "is_loaded"), [(flip, True), (halve, False)])
    def test_bad_memory_is_neither_resumed_nor_flushed(self, ranks, said, harm, is_loaded):
        ranks.start(2)
        save(ranks, 1)
        save(ranks, 2, storage_type=MEMORY)
        slot = digested(ranks, 2)
        harm(slot / "model.pt")
        if is_loaded:
            assert ranks.resume() == [(1, "memory")] * 2
            assert "not resumed from step 2 of history 1 in memory" in said.text
            assert slots.read(slot).committed is None  # nobody is offered it again
        assert relaunch(ranks) == [1, 1]
        assert on_storage(ranks.directory) == [1]

    @pytest.mark.parametrize("found", ["by the persist", "by its size"])
    def test_bad_memory_is_no_fresh_start_at_any_attempt_of_a_launch(self, ranks, monkeypatch, found):
        if found != "by the persist":
            monkeypatch.setenv("FASTCKPT_FLUSH", "0")
        ranks.start(2)
        save(ranks, 1, storage_type=MEMORY)
        slot = digested(ranks, 1)
        (halve if found == "by its size" else flip)(slot / "model.pt")
        for _ in range(3):
            ranks.workers_die()
            ranks.start_workers(2)
            until(lambda: found != "by the persist" or not slots.read(slot).committed, "the persist")
            assert all("step 1 of history 1 in memory" in text for text in ranks.refusals())
        save(ranks, 1, storage_type=MEMORY)  # a script that starts afresh after all
        ranks.workers_die()
        ranks.start_workers(2)
        assert [step for step, _ in ranks.resume()] == [1, 1]

    def test_verify_always_reads_back_what_was_written(self, ranks, monkeypatch, said):
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
        monkeypatch.setattr(publish, "digest_file", None)
        assert relaunch(ranks) == [1, 1]
        save(ranks, 2)  # without verify="always" nothing is read back


def test_restarted_workers_go_on_from_a_rollback_and_a_new_launch_goes_back_to_its_path(ranks):
    """A script passes its resume_path at each start, also when the agent has restarted it."""

    def restart() -> None:
        ranks.workers_die()
        ranks.start_workers(2)

    ranks.start(2)
    save(ranks, 50, 60, 100)
    ranks.end()
    old, rolled_back = ranks.directory / "checkpoint-50", [(50, "storage")] * 2
    ranks.start(2)
    assert ranks.resume(old) == rolled_back
    restart()
    assert ranks.resume(old) == rolled_back  # nothing was saved since
    save(ranks, 52)
    save(ranks, 55, storage_type=MEMORY)
    for step in (55, 57):  # again and again
        restart()
        assert ranks.resume(old) == [(step, "memory")] * 2
        save(ranks, 57, storage_type=MEMORY)
    assert relaunch(ranks) == [57, 57]
    save(ranks, 101, storage_type=MEMORY)  # which belongs to no rollback
    restart()
    assert ranks.resume(old) == rolled_back
    assert relaunch(ranks) == [101, 101]  # nothing has changed before the first save
    ranks.load(old)
    save(ranks, 55)
    ranks.end()
    ranks.start(2)
    assert ranks.resume(old) == rolled_back
    assert relaunch(ranks) == [55, 55]  # without a path, the newest history
    ranks.load(old)
    save(ranks, 56, storage_type=MEMORY)
    ranks.workers_die()
    shutil.rmtree(old)  # as retention may do meanwhile
    ranks.start_workers(2)
    assert ranks.resume(old) == [(56, "memory")] * 2


def test_a_foreign_checkpoint_is_refused_by_every_rank_with_a_way_to_load_it(ranks, directory):
    """What Flash Checkpoint left is no fresh start."""
    (directory / "100").mkdir(parents=True)
    torch.save(state(100), directory / "100/rank_0.pt")
    (directory / "dlrover_latest.txt").write_text("100")
    ranks.start(2)
    one, other = ranks.refusals()
    assert one == other and "Flash Checkpoint" in one and f"resume_path='{directory}/100/rank_0.pt'" in one
    loaded = ranks.load(directory / "100/rank_0.pt")
    assert all(torch.equal(each["weights"], state(100)["weights"]) for each in loaded)
    save(ranks, 101)
    assert relaunch(ranks) == [101] * 2, "our own beside it is loaded"
