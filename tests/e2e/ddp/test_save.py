"""save_checkpoint: its effects, results and refusals."""

import argparse
import collections
import datetime
import enum
import os
import pathlib
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fastckpt._core import metrics
from fastckpt._core.memory import slots
from fastckpt._core.saver import server
from fastckpt.ddp import DdpCheckpointer, StorageType
from fastckpt.errors import AgentLost, FastckptError, NotLoadable, StepError
from tests.e2e.ddp.conftest import Ranks, state

DISK, MEMORY = StorageType.DISK, StorageType.MEMORY


class Colour(enum.Enum):
    RED = 1


def slots_of(member: DdpCheckpointer) -> list[Path]:
    return sorted(member._writer.link.arena.glob("slot-*"))


def in_memory(member: DdpCheckpointer) -> list[int]:
    """Steps of the whole checkpoints in the arena, as its files tell."""
    return sorted(c.step for slot in slots_of(member) if (c := slots.read(slot).committed))


class TestPromotion:
    def test_a_disk_save_of_a_step_in_memory_copies_nothing(self, ranks: Ranks, directory: Path):
        (one,) = ranks.start()
        assert one.save_checkpoint(4, state(4), storage_type=MEMORY)
        before = metrics.counts["snapshot.fill"], metrics.counts["snapshot.skeleton"]
        result = one.save_checkpoint(4, state(4), storage_type=DISK)
        assert result and result.reason == "memory already holds this step"
        assert (metrics.counts["snapshot.fill"], metrics.counts["snapshot.skeleton"]) == before
        assert one.wait_latest_checkpoint(60) == 4
        assert torch.load(directory / "checkpoint-4/model.pt", weights_only=True)["step"] == 4

    def test_a_disk_save_by_two_ranks_persists_once(self, ranks: Ranks):
        ranks.start(2)
        before = metrics.counts["persist.manifest"]
        for storage_type in (MEMORY, DISK):
            for member in ranks.members:
                assert member.save_checkpoint(4, state(4), storage_type=storage_type)
            assert ranks.members[0].wait_latest_checkpoint(60) == (4 if storage_type is DISK else None)
        assert metrics.counts["persist.manifest"] == before + 1

    def test_of_two_saves_of_one_step_the_first_stays(self, ranks: Ranks):
        (one,) = ranks.start()
        assert one.save_checkpoint(4, state(4), storage_type=MEMORY).reason == ""
        again = one.save_checkpoint(4, state(5), storage_type=MEMORY)
        assert again.saved and again.reason == "memory already holds this step"
        assert one.load_checkpoint()["step"] == 4

    def test_two_disk_saves_of_one_step_persist_once(self, ranks: Ranks):
        (one,) = ranks.start()
        before = metrics.counts["persist.manifest"]
        for _ in range(3):
            assert one.save_checkpoint(4, state(4), storage_type=DISK)
            one.wait_latest_checkpoint(60)
        assert metrics.counts["persist.manifest"] == before + 1

    def test_a_disk_save_of_a_skipped_step_is_skipped_too(self, ranks: Ranks):
        ranks.start(2)
        first = ranks.members[0]
        for step in (1, 2, 3):
            assert first.save_checkpoint(step, state(step), storage_type=MEMORY)
        assert not first.save_checkpoint(4, state(4), storage_type=MEMORY)
        assert not first.save_checkpoint(4, state(4), storage_type=DISK)

    def test_a_promotion_uses_the_path_of_the_disk_save(self, ranks: Ranks, tmp_path: Path):
        (one,) = ranks.start()
        one.save_checkpoint(4, state(4), storage_type=MEMORY)
        one.save_checkpoint(4, state(4), tmp_path / "mine.pt", storage_type=DISK)
        one.wait_latest_checkpoint(60)
        assert torch.load(tmp_path / "mine.pt", weights_only=True)["step"] == 4


class TestSteps:
    def test_a_smaller_step_is_refused_with_a_remedy(self, ranks: Ranks):
        (one,) = ranks.start()
        one.save_checkpoint(7, state(7), storage_type=MEMORY)
        with pytest.raises(StepError, match=r"step 6 comes after step 7.*load_checkpoint\(resume_path=\.\.\.\)"):
            one.save_checkpoint(6, state(6), storage_type=MEMORY)
        assert one.save_checkpoint(8, state(8), storage_type=MEMORY)

    @pytest.mark.parametrize("step", [-1, -(2**70)])
    def test_a_negative_step_is_refused(self, ranks: Ranks, step: int):
        (one,) = ranks.start()
        with pytest.raises(StepError, match="whole numbers from 0"):
            one.save_checkpoint(step, state(0), storage_type=MEMORY)

    def test_a_step_number_that_is_too_large_is_refused_and_the_next_is_saved(self, ranks: Ranks):
        (one,) = ranks.start()
        with pytest.raises(FastckptError):
            one.save_checkpoint(2**70, state(0), storage_type=MEMORY)
        assert one.save_checkpoint(2**62, state(0), storage_type=DISK)
        assert one.wait_latest_checkpoint(60) == 2**62

    @pytest.mark.parametrize("step", [1.5, "7", None])
    def test_a_step_that_is_no_whole_number_is_refused(self, ranks: Ranks, step: object):
        (one,) = ranks.start()
        with pytest.raises(TypeError):
            one.save_checkpoint(step, state(0), storage_type=MEMORY)  # type: ignore[arg-type]

    def test_whole_numbers_of_other_types_are_accepted_as_steps(self, ranks: Ranks):
        (one,) = ranks.start()
        assert one.save_checkpoint(torch.tensor(3), state(3), storage_type=MEMORY).step == 3  # type: ignore[arg-type]
        assert one.save_checkpoint(np.int64(4), state(4), storage_type=MEMORY).step == 4  # type: ignore[arg-type]

    def test_zero_is_accepted_as_a_step(self, ranks: Ranks):
        (one,) = ranks.start()
        assert one.save_checkpoint(0, state(0), storage_type=DISK)
        assert one.wait_latest_checkpoint(60) == 0
        assert one.load_checkpoint()["step"] == 0 and one.loaded_step == 0

    @pytest.mark.parametrize("storage_type", ["DISK", 7])
    def test_a_bad_storage_type_is_refused_and_nothing_is_saved(self, ranks: Ranks, storage_type: object):
        (one,) = ranks.start()
        with pytest.raises((ValueError, TypeError)):
            one.save_checkpoint(1, state(1), storage_type=storage_type)  # type: ignore[arg-type]
        assert in_memory(one) == []
        assert one.save_checkpoint(1, state(1), storage_type=MEMORY)


class TestSkippedSaves:
    def test_a_save_without_a_free_slot_is_skipped_with_a_reason_and_tears_nothing(self, ranks: Ranks):
        first, second = ranks.start(2)
        for member in (first, second):
            assert member.save_checkpoint(1, state(1), storage_type=MEMORY)
        results = [first.save_checkpoint(step, state(step), storage_type=MEMORY) for step in (2, 3, 4, 5)]
        assert [result.saved for result in results] == [True, True, False, False]
        assert "waits for local rank 1" in results[2].reason
        assert [result.skipped for result in results] == [0, 0, 1, 2]
        assert in_memory(first) == [1]
        assert [loaded["step"] for loaded in ranks.load()] == [1, 1]

    def test_a_skipped_save_is_skipped_on_the_other_rank(self, ranks: Ranks):
        first, second = ranks.start(2)
        before = metrics.counts["skipped_saves"]
        reasons = [first.save_checkpoint(step, state(step), storage_type=MEMORY).reason for step in (1, 2, 3, 4)]
        late = [second.save_checkpoint(step, state(step), storage_type=MEMORY) for step in (1, 2, 3, 4)]
        assert [result.saved for result in late] == [True, True, True, False]
        assert late[3].reason == reasons[3] != ""
        assert metrics.counts["skipped_saves"] == before + 2
        assert in_memory(first) == [1, 2, 3]
        for member in (first, second):
            assert member.save_checkpoint(5, state(5), storage_type=MEMORY)

    def test_a_rank_that_has_closed_keeps_no_slot_occupied(self, ranks: Ranks):
        first, second = ranks.start(2)
        for member in (first, second):
            assert member.save_checkpoint(1, state(1), storage_type=MEMORY)
        assert first.save_checkpoint(2, state(2), storage_type=MEMORY)
        assert first.save_checkpoint(3, state(3), storage_type=MEMORY)
        second.close()
        steps = iter(range(4, 1000))

        def saved() -> bool:
            time.sleep(0.05)  # the saver learns of it soon
            return bool(first.save_checkpoint(next(steps), state(9), storage_type=MEMORY))

        assert any(saved() for _ in range(40))

    def test_a_save_waits_for_a_rank_that_has_yet_to_create_its_checkpointer(self, ranks: Ranks, directory: Path):
        """The first rank saves before the second has made its checkpointer: no checkpoint lacks a rank."""
        ranks.start(1)
        ranks.end()
        ranks.start(0)
        first = ranks.join(0, 2)
        ranks.members = [first]
        assert first.save_checkpoint(1, state(1), storage_type=MEMORY)
        assert in_memory(first) == []
        second = ranks.join(1, 2)
        ranks.members = [first, second]
        assert second.save_checkpoint(1, state(1), rank_state={"mine": 1}, storage_type=MEMORY)
        assert in_memory(first) == [1]


class TestClosedCheckpointer:
    def test_a_closed_checkpointer_refuses_to_save(self, ranks: Ranks):
        (one,) = ranks.start()
        one.close()
        one.close()
        for act in (
            lambda: one.save_checkpoint(1, state(1), storage_type=MEMORY),
            one.wait_latest_checkpoint,
            one.load_checkpoint,
        ):
            with pytest.raises(FastckptError, match="closed"):
                act()
        with pytest.raises(FastckptError, match="closed"):
            one.prepare(state(1))

    def test_a_save_in_a_forked_process_is_refused_and_disturbs_nothing(self, ranks: Ranks):
        (one,) = ranks.start()
        one.save_checkpoint(1, state(1), storage_type=MEMORY)
        acts = (
            lambda: one.save_checkpoint(2, state(2), storage_type=MEMORY),
            one.wait_latest_checkpoint,
            one.load_checkpoint,
        )
        child = os.fork()
        if child == 0:
            refused = 0
            for act in acts:
                try:
                    act()
                except FastckptError as error:
                    refused += "forked" in str(error)
            one.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(acts)
        assert one.save_checkpoint(2, state(2), storage_type=MEMORY)
        assert one.load_checkpoint()["step"] == 2

    def test_a_lost_launcher_is_reported_and_does_not_end_training(self, ranks: Ranks, monkeypatch):
        monkeypatch.setattr(server, "WRITERS_TIMEOUT", 0.1)
        (one,) = ranks.start()
        one.save_checkpoint(1, state(1), storage_type=MEMORY)
        assert ranks.saver is not None
        ranks.saver.close()
        for step in (2, 3):
            result = one.save_checkpoint(step, state(step), storage_type=MEMORY)
            assert not result.saved and "gone" in result.reason
        assert result.skipped == 2
        with pytest.raises(AgentLost, match="gone"):
            one.wait_latest_checkpoint(5)


class TestPath:
    def test_a_path_of_the_user_is_read_by_stock_torch_and_overwritten_by_each_save(self, ranks: Ranks, tmp_path: Path):
        (one,) = ranks.start()
        path = tmp_path / "deep" / "latest.pt"
        for step in (1, 2, 3):
            assert one.save_checkpoint(step, state(step), path, DISK)
            one.wait_latest_checkpoint(60)
            loaded = torch.load(path, weights_only=True)
            assert loaded["step"] == step
            assert torch.equal(loaded["weights"], state(step)["weights"])
        assert one.load_checkpoint()["step"] == 3
        assert sorted(p.name for p in path.parent.iterdir()) == ["latest.pt"]

    def test_a_relative_path_is_resolved_from_the_working_directory(self, ranks: Ranks, tmp_path: Path, monkeypatch):
        (one,) = ranks.start()
        monkeypatch.chdir(tmp_path)
        assert one.save_checkpoint(1, state(1), "mine.pt", DISK)
        one.wait_latest_checkpoint(60)
        assert torch.load(tmp_path / "mine.pt", weights_only=True)["step"] == 1

    def test_with_one_path_per_step_the_newest_is_resumed(self, ranks: Ranks, directory: Path):
        (one,) = ranks.start()
        for step in (1, 2):
            one.save_checkpoint(step, state(step), directory / f"checkpoint-{step}.pt", DISK, {"position": step})
            one.wait_latest_checkpoint(60)
        ranks.end()
        (one,) = ranks.start()
        assert one.load_checkpoint()["step"] == 2
        assert (one.loaded_from, one.rank_state) == ("storage", {"position": 2})

    def test_the_default_path_has_a_manifest_and_a_tracker(self, ranks: Ranks, directory: Path):
        ranks.start(2)
        for member in ranks.members:
            member.save_checkpoint(12, state(12), storage_type=DISK)
        ranks.members[0].wait_latest_checkpoint(60)
        place = directory / "checkpoint-12"
        assert sorted(p.name for p in place.iterdir()) == ["manifest.json", "model.pt", "rank_0.pt", "rank_1.pt"]
        assert (directory / "latest_checkpointed_iteration.txt").read_text() == "12"
        for name in ("model.pt", "rank_0.pt", "rank_1.pt"):
            torch.load(place / name, weights_only=True)

    def test_a_file_at_a_path_of_the_user_stays_when_a_default_save_follows(self, ranks: Ranks, tmp_path: Path):
        (one,) = ranks.start()
        one.save_checkpoint(1, state(1), tmp_path / "mine.pt", DISK)
        one.wait_latest_checkpoint(60)
        one.save_checkpoint(2, state(2), storage_type=DISK)
        one.wait_latest_checkpoint(60)
        assert torch.load(tmp_path / "mine.pt", weights_only=True)["step"] == 1
        assert one.load_checkpoint()["step"] == 2


REFUSED = {
    "numpy generator": np.random.get_state(),
    "Path": pathlib.PurePosixPath("x"),
    "datetime": datetime.datetime(2026, 1, 1),
    "Enum": Colour.RED,
    "defaultdict": collections.defaultdict(list),
    "Namespace": argparse.Namespace(a=1),
}


class TestNotLoadable:
    @pytest.mark.parametrize("what", REFUSED)
    def test_a_value_that_would_not_load_is_refused_with_its_key(self, ranks: Ranks, what: str):
        (one,) = ranks.start()
        one.save_checkpoint(1, state(1), storage_type=MEMORY)
        bad = state(2) | {"extra": {"deep": [0, REFUSED[what]]}}
        with pytest.raises(NotLoadable, match=r"state\['extra'\]\['deep'\]\[1\]"):
            one.save_checkpoint(2, bad, storage_type=MEMORY)
        assert in_memory(one) == [1]
        assert one.save_checkpoint(2, state(2), storage_type=MEMORY)
        assert one.load_checkpoint()["step"] == 2

    def test_a_value_in_rank_state_that_would_not_load_is_refused_with_its_key(self, ranks: Ranks):
        (one,) = ranks.start()
        with pytest.raises(NotLoadable, match=r"\['state'\]\['generator'\]"):
            one.save_checkpoint(1, state(1), rank_state={"generator": np.random.get_state()}, storage_type=MEMORY)
        assert one.save_checkpoint(1, state(1), storage_type=MEMORY)

    def test_a_value_that_would_not_load_is_refused_in_later_saves(self, ranks: Ranks):
        (one,) = ranks.start()
        one.save_checkpoint(1, state(1), storage_type=MEMORY)
        for step in (2, 3):
            with pytest.raises(NotLoadable, match="when"):
                one.save_checkpoint(step, state(step) | {"when": datetime.date(2026, 1, 1)}, storage_type=MEMORY)

    def test_a_value_that_needs_pickle_is_saved_when_the_directory_is_trusted(self, ranks: Ranks):
        (one,) = ranks.start(weights_only=False)
        assert one.save_checkpoint(1, state(1) | {"when": datetime.date(2026, 1, 1)}, storage_type=MEMORY)
        assert one.load_checkpoint()["when"] == datetime.date(2026, 1, 1)

    @pytest.mark.parametrize("culprit", [threading.Lock(), lambda: 0, (x for x in ())])
    def test_a_value_that_cannot_be_pickled_leaves_the_next_save_possible(self, ranks: Ranks, culprit: object):
        (one,) = ranks.start()
        one.save_checkpoint(1, state(1), storage_type=DISK)
        for extra, path in ((culprit, "['extra']"), ([{"deep": culprit}], "['extra'][0]['deep']")):
            with pytest.raises((TypeError, AttributeError, pickle.PicklingError)) as error:
                one.save_checkpoint(2, state(2) | {"extra": extra}, storage_type=DISK)
            assert error.value.__notes__[0].startswith(f"fastckpt: state{path}, a {type(culprit).__module__}.")
        assert in_memory(one) == [1]
        assert one.save_checkpoint(2, state(2), storage_type=DISK)
        assert one.wait_latest_checkpoint(60) == 2


class TestStructure:
    """States that change from save to save come back as they were."""

    def test_a_state_changed_right_after_the_save_is_saved_as_it_was(self, ranks: Ranks):
        (one,) = ranks.start()
        current = state(1, 500_000)
        one.save_checkpoint(1, current, storage_type=MEMORY)
        current["weights"].fill_(9)
        assert torch.equal(one.load_checkpoint()["weights"], state(1, 500_000)["weights"])

    def test_a_state_that_grows_and_shrinks_is_saved(self, ranks: Ranks):
        (one,) = ranks.start()
        for step, size in enumerate([10, 100_000, 10, 300_000, 299_999, 1, 300_000, 0], 1):
            assert one.save_checkpoint(step, state(step, size), storage_type=DISK)
            loaded = one.load_checkpoint()
            assert torch.equal(loaded["weights"], state(step, size)["weights"])
            assert one.wait_latest_checkpoint(60) == step

    def test_signs_and_types_of_numbers_are_kept(self, ranks: Ranks):
        (one,) = ranks.start()
        values = [0, 0.0, -0.0, False, True, 1, 1.0, float("inf"), 2**62, -(2**63), 2**64, 1e-320, -0.0, 0.0, 3]
        for step, value in enumerate(values):
            one.save_checkpoint(step, {"value": value, "pair": (value, {"v": value})}, storage_type=MEMORY)
            loaded = one.load_checkpoint()
            assert repr(loaded) == repr({"value": value, "pair": (value, {"v": value})})

    def test_keys_that_are_equal_but_of_another_type_are_kept(self, ranks: Ranks):
        (one,) = ranks.start()
        for step, key in enumerate(
            [1, 1.0, True, 0.0, -0.0, (1, 0), (1, False), (1.0, 0), (1, (0, 1)), (1, (0, True))]
        ):
            one.save_checkpoint(step, {key: "here"}, storage_type=MEMORY)
            assert repr(one.load_checkpoint()) == repr({key: "here"})
