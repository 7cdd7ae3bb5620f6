"""What ranks have unlike in a state that one of them saves for all: each comes back with its own."""

import copy
import itertools
import json
import re
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fastckpt._core.replicas.own_entries import ABSENT, ALONE, THERE, entries, own_entries, with_own, without
from fastckpt._core.replicas.rank_differences import RankDifferences
from fastckpt._core.replicas.replica_faults import ReplicaFault, replica_fault, unlike_entries
from fastckpt._core.replicas.state_digest import digest_of, sum_of_words
from tests.faults.faults import kill
from tests.faults.jobs import Job, assert_all_injected
from tests.support.tables import for_each

PROGRAM = {"program": str(Path(__file__).with_name("unlike.py")), "FASTCKPT_PRELOAD": "auto"}


def assert_as_without_checkpoints(job: Job, ranks: int) -> None:
    """The very weights, states and random numbers of a training that nothing befell, which each rank made at the end.

    And the very losses, where no fault of a processor has changed them.
    """
    for rank in range(ranks):
        [plain] = [line for line in job.log(rank) if "plain" in line]
        assert job.ends()[f"end.{rank}"] == plain["end"], job.text()
        if not job.injected():
            continue
        assert job.losses(rank) == {step: {loss} for step, loss in enumerate(plain["plain"], 1)}, job.text()


REFUSED = {"by_dcp": "weight", "by_hsdp": "model.weight (shard of rank 0)", "by_folder": "optimizer.0."}
"""What no file has a place for, by the way of saving it."""


def test_each_rank_comes_back_with_its_own_after_kills(new_job):
    """Also with what begins to differ later; and a rank that closes before its first step is not waited for."""
    job = new_job().with_faults(kill(1, at="snapshot.fill", step=5), kill(0, at="snapshot.fill", step=9))
    job.run("--drifts", "6", restarts=2, **PROGRAM)
    assert_all_injected(job)
    assert_as_without_checkpoints(job, 2)
    assert job.stored()[0] == 12
    assert [step for step, _ in job.resumes()] == [0, 4, 8]
    found = [line["due"] for line in job.log(0) if "drifting" in line.get("unlike", ())]
    assert found == [8, 9, 10, 11, 12] and job.text().count("unlike drifting:") == 1, job.text()
    assert [line["alone"] for line in job.log(0) if "alone" in line] == [1, 2, 3]


def test_shards_of_each_rank_come_back_and_what_no_file_has_a_place_for_is_refused(new_job):
    """And another number of ranks is told what it cannot have."""
    job = new_job().with_faults(kill(0, at="snapshot.fill", step=9))
    job.run("--way", "fsdp2", restarts=1, **PROGRAM)
    assert_all_injected(job)
    assert_as_without_checkpoints(job, 2)
    assert [step for step, _ in job.resumes()] == [0, 8]
    for rank in (0, 1):
        said = json.loads((job.folder / f"said.{rank}").read_text())
        for way, name in REFUSED.items():
            assert said[f"{way}, equal"] == "None" and said[f"{way}, unlike"].startswith(f"ranks have unlike {name}")
            assert "use fastckpt.Checkpointer" in said[f"{way}, unlike"]
    job.start("--way", "fsdp2", "--steps", "14", ranks=1, restarts=0, **PROGRAM)
    assert job.wait() != 0
    assert "and this job has 1" in job.text(), job.text()


def test_a_flipped_bit_is_found_and_what_was_saved_since_then_is_not_resumed(new_job):
    script = ("--way", "equal", "--apart", "20", "--steps", "80", "--memory", "2", "--disk", "10")
    job = new_job().run(*script, "--flips", "54", ranks=3, restarts=1, **PROGRAM)
    text = job.text()
    assert [line["loaded"] for line in job.log(0) if "loaded" in line] == [0, 50], text
    assert_as_without_checkpoints(job, 3)
    (found,) = {int(step) for step in re.findall(r"differs? at step (\d+)", text)}
    assert 54 < found <= 70 and " repeated, 1 restart, " in text and "(rank 1 on" in text, text


# --- digests, and states put together


EQUAL = [
    torch.arange(7, dtype=torch.float32),
    torch.zeros(0),
    torch.tensor(3.0, dtype=torch.bfloat16),
    torch.arange(12).view(3, 4).t(),
    torch.randn(5, dtype=torch.complex64).conj(),
    [1, {"a": torch.ones(2)}, (None, True)],
    {},
    b"bytes",
    {"a", 1},
    Counter("abc"),
    torch.Size([1, 2]),
]


def test_equal_entries_have_equal_digests():
    for leaf in EQUAL:
        assert digest_of(leaf) == digest_of(copy.deepcopy(leaf))
    assert digest_of(lock := threading.Lock()) == digest_of(lock)


def test_each_flipped_bit_of_a_tensor_changes_its_digest_on_the_processor_and_on_a_device():
    for dtype, count in ((torch.float32, 5), (torch.uint8, 11), (torch.bfloat16, 3)):
        whole = torch.arange(count).to(dtype)
        for bit in range(whole.nbytes * 8):
            other = whole.clone()
            other.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
            assert digest_of(other) != digest_of(whole) and sum_of_words(other) != sum_of_words(whole), (dtype, bit)
    words = torch.arange(64)
    assert sum_of_words(words) != sum_of_words(words.flip(0)) and sum_of_words(words[1:]) != sum_of_words(words[:-1])


def test_unlike_entries_are_named_with_whether_their_shapes_are_alike():
    ranks = [
        {"a": "f(2,):1", "b": "f(2,):5", "c": "f(2,):1"},
        {"a": "f(2,):2", "b": "f(2,):5", "c": "f(3,):1", "d": "x:"},
    ]
    assert unlike_entries(ranks) == {"a": True, "c": False, "d": False}
    assert unlike_entries(ranks, "fine") == {"a": True, "c": False}
    assert unlike_entries(ranks, "fine", ["d"]) == {"a": True, "c": False, "d": False}
    assert unlike_entries([*reversed(ranks)], "fine", ["d"]) == {"a": True, "c": False}, "the other gives nothing of d"
    more = [{**each, "d.5": "x:1"} for each in ranks]
    more[1]["d.6"] = "x:1"
    assert unlike_entries(more, "fine", ["d"]) == {"a": True, "c": False, "d": False, "d.6": False}


def test_what_was_loaded_is_known_to_be_equal_if_as_many_ranks_had_compared_it():
    session: Any = SimpleNamespace(place=SimpleNamespace(world_size=2, rank=0))
    differences, expanded = RankDifferences(session), torch.ones(1).expand(1 << 50)
    loaded = {
        "model": {"a": torch.ones(2), "b": torch.ones(3, device="meta"), "c": expanded},
        "optimizer": {"x": torch.ones(2), "y": 5},
        "others": {"z": torch.ones(1)},
    }
    own = own_entries(loaded, {"optimizer.x": True}, 2)
    differences.know(loaded, own, 1)
    assert not differences._known
    differences.know(loaded, own, 2)
    assert [*differences._known] == ["model.a", "model.b", "model.c"]


ONES: list[dict[Any, Any]] = [{}, {0: {"m": 1}, 2: {"m": 3}}, {1: {"m": 2}, 2: {"k": 3}}, {0: 5, "0": 6}]
OTHERS: list[dict[Any, Any]] = [{}, {0: {"m": 1}}, {1: {"m": 4}, 2: {"m": 3, "k": 7}}]


@for_each(*itertools.product(ONES, OTHERS))
def test_a_rank_has_its_own_again_whatever_the_first_one_had(one, other):
    states = [{"optimizer": {"state": each, "groups": [1]}, "more": 5} for each in (one, other)]
    digests = [{name: digest_of(leaf) for name, _, leaf in entries(state)} for state in states]
    unlike = unlike_entries(digests)
    for state in states:
        assert with_own(copy.deepcopy(states[0]), own_entries(state, unlike, 2), 2, 0) == state


def test_another_number_of_ranks_loads_what_the_first_one_had_and_is_told_by_name(caplog):
    own = own_entries({"more": 5, "x": 1}, {"more": True, "a.b": False}, 2)
    assert (own[THERE], own[ABSENT], own[ALONE]) == ([[["more"], 5]], ["a.b"], ["a.b"])
    assert with_own({"more": 7, "x": 1}, own, 3, 0) == {"more": 7, "x": 1}
    assert "2 ranks saved their own of a.b, more, and this job has 3" in caplog.text


def test_a_state_without_some_entries_shares_no_dictionary_with_it():
    state = {"a": {"b": 1, "c": {"d": 2}}, "e": {}}
    left = without(state, {"a.b"})
    assert left == {"a": {"c": {"d": 2}}, "e": {}} and left["a"] is not state["a"]


# --- faults of processors

EQUAL_RANK = {"model.a": "torch.float32(2,):1", "model.b": "torch.float32(2,):2", "others.c": "int:3"}
A, B, C = EQUAL_RANK


def ranks_with(count: int, *wrong: tuple[int, str, str]) -> list[dict[str, str]]:
    ranks = [dict(EQUAL_RANK) for _ in range(count)]
    for rank, name, digest in wrong:
        ranks[rank][name] = digest
    return ranks


@for_each(
    ("the one that most are not like", ranks_with(3, (1, A, "x")), {A, B}, ReplicaFault([A], [1])),
    ("of two nobody knows which", ranks_with(2, (1, A, "x")), {A, B}, ReplicaFault([A], [])),
    ("three that train apart", ranks_with(3, (1, A, "x"), (2, A, "y")), {A, B}, None),
    ("two halves", ranks_with(4, (1, A, "x"), (3, A, "x")), {A, B}, None),
    ("two faults", ranks_with(5, (1, A, "x"), (4, B, "y")), {A, B}, ReplicaFault([A, B], [1, 4])),
    ("unlike before", ranks_with(3, (1, A, "x")), {B}, None),
    ("what may differ", ranks_with(3, (1, C, "x")), {A, B}, None),
    ("a rank without a state", [*ranks_with(3, (1, A, "x")), {}], {A, B}, ReplicaFault([A], [1])),
)
def test_a_rank_is_at_fault_where_most_have_what_it_has_not(ranks, known, fault):
    unlike = unlike_entries([each for each in ranks if each])
    assert replica_fault(ranks, unlike, known, len(known)) == fault
