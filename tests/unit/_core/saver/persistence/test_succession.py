"""Rules by which rounds of agents follow each other, on one directory, with real records."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.saver.persistence import predecessor, succession
from fastckpt._core.saver.persistence import tenure as tenure_module
from fastckpt._core.saver.persistence.opening import Opening
from fastckpt._core.saver.persistence.predecessor import Job
from fastckpt._core.saver.persistence.succession import (
    Party,
    is_continued,
    is_of_another_line,
    may_follow,
    pause_before,
)
from fastckpt._core.saver.persistence.tenure import Tenure
from fastckpt._core.storage.history import Record
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import Superseded
from tests.support.waits import until

PART = 40


class Nodes:
    """Agents of one job with one directory, each by its name."""

    def __init__(self, root: Path, names: str) -> None:
        self.store, self.members = CheckpointDirectory(root / "run"), tuple(names)
        self.tenures = {name: Tenure(self.store, Job(name, "/run"), enabled=name == names[0]) for name in names}
        self.meet(names)

    def meet(self, names: str) -> int:
        """Have these form a round; the newest history that its first one finds."""
        for name in names:
            self.tenures[name].begin_round(names, names[0])
        return self.tenures[names[0]].enable()

    def opening(self, names: str, history: int, step: int, parent: SaveId | None = None) -> Opening:
        members = tuple(names) if len(names) > 1 else ()
        return Opening(SaveId(history, step), f"round of {names}", members, parent)

    def hold(self, names: str, history: int, parent: SaveId | None = None) -> None:
        self.tenures[names[0]].hold(self.opening(names, history, 5, parent))


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Three that have opened the first history; all is as long as it is, but a small part of it."""
    monkeypatch.setattr(tenure_module, "RENEWAL", tenure_module.RENEWAL / PART)
    monkeypatch.setattr(succession, "MINORITY_WAIT", 0.3)
    monkeypatch.setattr(predecessor, "STALE", predecessor.STALE / PART)
    made = Nodes(tmp_path, "abc")
    for tenure in made.tenures.values():
        tenure.hold(made.opening("abc", 1, 5))  # as each agent does with its first save
    yield made
    for tenure in made.tenures.values():
        tenure.close()


def lost_by_c(nodes: Nodes) -> Tenure:
    """Two go on; the third one, which has lost the place to them."""
    for half in ("ab", "c"):
        assert nodes.meet(half) == 1, "both are members of the last history: neither waits for the other"
    nodes.hold("ab", 2)
    taken = r"taken by other nodes of this job, which opened history 2: process .*launch a,"
    with pytest.raises(Superseded, match=taken):
        nodes.hold("c", 2)
    lost = nodes.tenures["c"].lost_to
    assert lost is not None and lost.launch == "a" and not nodes.tenures["c"].may_return()
    return nodes.tenures["c"]


def test_a_half_that_waits_goes_on_once_the_other_half_is_lost(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = lost_by_c(nodes)
    for name in "ab":
        nodes.tenures[name].stop()
    until(waits.may_return)
    monkeypatch.setattr(predecessor, "LONGEST_LOOK", 0.2)
    time.sleep(0.4)  # a rendezvous may take longer than it takes for a place to count as silent
    assert nodes.meet("c") == 2
    nodes.hold("c", 3, SaveId(1, 5))
    opened = nodes.store.histories.read(3)
    assert opened is not None and opened.launch == "c"


def test_a_smaller_half_leaves_time_to_the_larger_one(nodes: Nodes) -> None:
    began = time.monotonic()
    nodes.meet("c")
    nodes.hold("c", 2)
    assert time.monotonic() - began >= 0.3
    with pytest.raises(Superseded):
        nodes.meet("ab")


def test_a_half_that_lost_its_place_returns_with_those_who_have_it(nodes: Nodes) -> None:
    nodes.meet("ab")
    nodes.hold("ab", 2)
    with pytest.raises(Superseded):
        nodes.meet("c")
    assert nodes.meet("cab") == 2, "also as the first of a round with them"
    nodes.hold("cab", 3)
    assert nodes.tenures["a"].check(nodes.opening("cab", 3, 7)) and not nodes.tenures["c"].lost


@pytest.mark.parametrize("finished", [True, False])
def test_a_half_that_waits_knows_whether_the_others_have_brought_the_job_to_its_end(
    nodes: Nodes, finished: bool
) -> None:
    waits = lost_by_c(nodes)
    assert not waits.may_return() and not waits.ended_elsewhere
    nodes.tenures["a"].close(finished=finished)
    assert waits.may_return() and waits.ended_elsewhere == finished
    assert nodes.meet("c") == 2 and not waits.ended_elsewhere, "a round that begins all the same is of this half"


def test_a_node_that_opens_no_history_reports_nothing_once_others_have_opened_one(nodes: Nodes) -> None:
    before = nodes.opening("abc", 1, 5)
    assert nodes.tenures["b"].check(before)
    nodes.meet("bc")
    nodes.meet("a")
    nodes.hold("bc", 2, SaveId(1, 5))
    with pytest.raises(Superseded, match=r"opened history 2: process .*launch b,"):
        nodes.tenures["a"].check(before)
    assert nodes.tenures["c"].check(before), "the history of its own round goes on from that save"
    assert not nodes.tenures["c"].check(nodes.opening("abc", 1, 6)), "and not from a later one"


def test_another_member_renews_a_record_whose_holder_does_not(nodes: Nodes) -> None:
    """Else a second launch would take a job for dead whose other nodes begin anew for longer than that."""
    nodes.tenures["a"].stop()
    assert nodes.tenures["b"].check(nodes.opening("abc", 1, 5))
    nodes.tenures["b"].enter()
    time.sleep(tenure_module.RENEWAL)
    count = nodes.store.histories.read(1).count  # type: ignore[union-attr]
    until(lambda: nodes.store.histories.read(1).count > count)  # type: ignore[union-attr]


def test_a_record_with_another_token_is_not_that_of_this_round() -> None:
    """Both halves have members of the last round: only one of them has made the record."""
    party = Party("a", "/run", frozenset("ab"), "a")
    assert party.has_opened(Record(2, "mine", "c", "/run", members=("a", "c")), "mine")
    assert not party.has_opened(Record(2, "other", "c", "/run", members=("a", "c")), "mine")
    assert not party.has_opened(Record(3, "", "c", "/run", members=("a", "c")))
    assert not party.has_opened(Record(3, "", "a", "/elsewhere"))
    assert may_follow(party, Record(2, "other", "c", "/run", members=("b", "c")), has_died=False)
    assert not may_follow(party, Record(2, "other", "c", "/run"), has_died=False)


def test_only_fewer_than_half_of_the_last_members_wait() -> None:
    last = Record(1, launch="a", members=("a", "b", "c", "d"))
    assert [pause_before(half, last) > 0 for half in ("a", "ab", "abc", "x")] == [True, False, False, False]
    assert pause_before("a", None) == pause_before("a", Record(1, launch="a", members=tuple("abcd"), closed=True)) == 0


def test_a_save_is_continued_only_if_all_newer_histories_go_on_from_it() -> None:
    records = {2: Record(2, parent=SaveId(1, 5)), 3: Record(3, parent=SaveId(1, 9)), 4: Record(4, parent=SaveId(3, 2))}
    assert is_continued(SaveId(1, 5), 4, records.get) and not is_continued(SaveId(1, 6), 4, records.get)
    assert is_continued(SaveId(3, 2), 4, records.get) and not is_continued(SaveId(2, 1), 4, records.get)
    assert not is_continued(SaveId(1, 5), 1000, records.get)


def test_memory_of_a_half_that_has_restarted_more_often_than_the_other_one_is_of_another_line() -> None:
    """The other one has opened history 2; this one is at history 3, which nobody has opened."""
    save = Opening(SaveId(3, 35), "mine", ("b", "c"), SaveId(1, 10))
    known = {"newest": lambda: 2, "lost": False}
    assert is_of_another_line(save, None, **known)
    assert not is_of_another_line(replace(save, parent=SaveId(2, 90)), None, **known)
    assert is_of_another_line(replace(save, parent=SaveId(2, 15)), None, newest=lambda: 2, lost=True)
    assert not is_of_another_line(replace(save, is_rollback=True), None, **known)
    assert not is_of_another_line(replace(save, members=(), parent=None), None, **known)
    assert not is_of_another_line(save, Record(3, "mine"), newest=lambda: 9, lost=True)
    assert is_of_another_line(save, Record(3, "other"), **known)
