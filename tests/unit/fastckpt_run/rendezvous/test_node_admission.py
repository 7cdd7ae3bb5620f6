"""Nodes that come to a running job, over real stores: those that do not fit cost its members nothing."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.memory.directory_claim import DirectoryClaim
from fastckpt._core.storage.local.identity import mark
from fastckpt.errors import ConfigError
from fastckpt_run.rendezvous import node_admission
from fastckpt_run.rendezvous.handler import FastckptRendezvousHandler as Handler
from fastckpt_run.rendezvous.job_terms import JobTerms
from fastckpt_run.rendezvous.membership import BEFORE_THE_FIRST, Node, Round
from fastckpt_run.rendezvous.node_admission import JobDirectory, NodeAdmission, _Witnesses
from tests.unit.fastckpt_run.rendezvous.agents import (
    PATIENCE,
    Agents,
    agents,
    ended,
    in_thread,
    join,
    kill,
    meet,
    ranks,
    until,
)

TERMS = JobTerms("0.5.0", "2.13.0", "1", "1:3", "train.py")
NEWER = replace(TERMS, version="0.6.0")
OTHER = replace(TERMS, replicas="2")


def new(job: Agents, terms: JobTerms = TERMS, arguments: Sequence[str] = (), **options: Any) -> Handler:
    made = job.new(**options)
    made.admission = NodeAdmission(terms, arguments)
    return made


@contextmanager
def members_of(count: int, fewest: int = 1, most: int = 3, **options: Any) -> Iterator[tuple[Agents, list[Handler]]]:
    with agents(fewest, most, **options) as job:
        nodes = [new(job) for _ in range(count)]
        meet(nodes)
        yield job, nodes


def assert_undisturbed(members: Sequence[Handler]) -> None:
    """Nobody has ended their round, and nobody waits for a place in the next one."""
    assert [node.num_nodes_waiting() for node in members] == [0] * len(members)
    records = members[0]._alive.store
    last = records.last_round()
    assert last.name == members[0].round.name and not records.is_ended(last) and records.slots(last) == 0


def assert_joins(job: Agents, members: Sequence[Handler]) -> Handler:
    fitting = new(job)
    join(fitting, [*members])
    assert ranks([fitting]) == [len(members)]
    return fitting


def refused(future: "Future[object]") -> str:
    with pytest.raises(ConfigError) as error:
        future.result(PATIENCE)
    return str(error.value)


def test_a_newcomer_or_spare_that_does_not_fit_is_refused_and_the_members_notice_nothing():
    with members_of(2, 2, 2, spares=1) as (job, members):
        assert "--fast-replicas is 2" in refused(in_thread(new(job, OTHER).next_rendezvous))
        assert_undisturbed(members)
    with members_of(2) as (job, members):
        for terms in (OTHER, replace(TERMS, version="0.4.9"), replace(TERMS, torch="2.12.0")):
            stranger = new(job, terms)
            assert " the nodes of the job " in refused(in_thread(stranger.next_rendezvous))
            stranger.shutdown()  # as torch does after an error, which ends the job
            assert_undisturbed(members)
        assert not members[0].is_closed()
        assert_joins(job, members)


def test_nodes_of_a_newer_version_wait_say_so_once_and_go_on_when_the_others_have_left(caplog):
    with agents(1, 3, join=1.5, last_call=0.5) as job:
        store = job.new(job="another")  # what holds the store stays
        members = [new(job), new(job)]
        meet(members)
        newer = [new(job, NEWER), new(job, NEWER)]
        waiting = [in_thread(node.next_rendezvous) for node in newer]
        time.sleep(2.0)  # longer than nodes wait for enough others
        assert_undisturbed(members)
        meet(members)  # a restart of the members
        assert_undisturbed(members)
        members[1].leave()
        ended(members[:1])
        meet(members[:1])
        assert members[0].round.number == 3 and not any(future.done() for future in waiting)
        assert caplog.text.count("this node runs fastckpt 0.6.0, and the nodes of the job 0.5.0: it waits") == 2
        members[0].leave()
        assert all(future.result(PATIENCE) for future in waiting)
        assert sorted(ranks(newer)) == [0, 1] and newer[0].round.number == 4
        assert newer[0].round.terms == NEWER
        assert "install fastckpt 0.6.0 here" in refused(in_thread(new(job).next_rendezvous))
        assert_undisturbed(newer)
        assert store._endpoints.server is not None


def test_a_job_whose_members_are_all_lost_locks_nobody_out():
    """Such as one whose store another job holds, and that is started again with other settings."""
    with agents(1, 2, silence=1.0, last_call=1.0) as job:
        store, members = job.new(job="another"), [new(job), new(job)]
        meet(members)
        for node in members:
            kill(node)
        begin = time.monotonic()
        nodes = [new(job, OTHER), new(job, OTHER)]
        meet(nodes)
        assert time.monotonic() - begin >= 1.0, "they may only have been late"
        assert nodes[0].round.terms == OTHER and nodes[0].round.number == 2
        assert store._endpoints.server is not None


def test_a_node_that_has_come_all_the_same_is_left_out_by_who_decides(monkeypatch):
    """Such as one that took all members for lost, and was first in the next meeting."""
    with members_of(2) as (job, members):
        stranger = new(job, OTHER)
        admits, asked = stranger.admission.admits, list[Round]()

        def admits_once(records, me, patience, last):
            asked.append(last)
            return len(asked) == 1 or admits(records, me, patience, last)

        monkeypatch.setattr(stranger.admission, "admits", admits_once)
        came = in_thread(stranger.next_rendezvous)
        ended(members)
        meet(members)
        assert members[0].round.ranks.keys() == {node.id for node in members}
        assert "--fast-replicas is 2" in refused(came)
        assert_undisturbed(members)


def test_of_many_members_one_that_lives_is_found_though_few_are_looked_at(monkeypatch):
    monkeypatch.setattr(node_admission, "_FRESH", 0.3)
    with agents(1, 3) as job:
        observer, alive = job.new(), job.new()
        records = observer._records
        dead = tuple(Node(f"dead-{number}", "h", "a", {}) for number in range(70))
        last = Round(1, "r", (*dead, alive._me))
        assert records.complete(BEFORE_THE_FIRST, last)
        witnesses = _Witnesses()
        assert witnesses.live(records, last, 3.0) is None, "nobody has given a sign yet"
        until(lambda: witnesses.live(records, last, 3.0), "its sign is seen")
        kill(alive)
        begin = time.monotonic()
        until(lambda: witnesses.live(records, last, 3.0) is False, "none is seen any more")
        assert time.monotonic() - begin > 2.0


def directory(path: Path, text: str = "0" * 32) -> Path:
    path.mkdir(parents=True)
    assert mark(path, text) == text
    return path


def arena_of(directory: Path, folder: Path) -> Path:
    folder.mkdir()
    DirectoryClaim(seen=(directory / ".fastckpt/identity").read_text()).write(folder)
    return folder


FITTING = ("--lr 1", "--dir {job}", "--dir={link}", "--dir {link} --dir {empty}", "--data {empty}")
UNFITTING = {
    "--dir {empty}": "--dir is {empty} on this node, and the job that it would join has its checkpoints in",
    "--dir={other}": "--dir is {other} on this node, and the job that it would join has",
    "--dir {file}": "--dir is {file} on this node",
    "--dir {nowhere}": "--dir is {nowhere} on this node",
}


def test_a_node_fits_by_any_path_of_the_directory_and_not_without_it_or_with_another(tmp_path, monkeypatch):
    places = {"job": directory(tmp_path / "job"), "other": directory(tmp_path / "other", "1" * 32)}
    places |= {name: tmp_path / name for name in ("link", "empty", "file", "nowhere")}
    places["link"].symlink_to(places["job"])
    places["empty"].mkdir()
    places["file"].touch()
    known = JobDirectory(str(places["job"]), "0" * 32, ["--dir"])
    assert not any(known.misfit(each.format(**places).split()) for each in FITTING)
    for arguments, text in UNFITTING.items():
        found = known.misfit(arguments.format(**places).split())
        assert found is not None and text.format(**places) in found.text
    look = node_admission.identity
    monkeypatch.setattr(node_admission, "identity", lambda at: time.sleep(1) if "unanswered" in str(at) else look(at))
    directory(tmp_path / "another", "1" * 32)
    (tmp_path / "unreadable/.fastckpt/identity").mkdir(parents=True)
    for name, waits, text in (
        ("another", False, "another is not the checkpoint directory of the job"),
        ("unreadable", True, "unreadable cannot be read on this node"),  # storage may answer again
        ("unanswered", True, "unanswered cannot be read on this node: it has not answered for 0.2 s"),
    ):
        monkeypatch.setattr(node_admission, "_ANSWER", 0.2 if name == "unanswered" else PATIENCE)
        found = JobDirectory(str(tmp_path / name), "0" * 32).misfit([])
        assert found is not None and text in found.text and found.waits == waits


def test_the_first_node_announces_directories_as_soon_as_they_are_known_and_the_next_first_one_all_the_same(tmp_path):
    place = directory(tmp_path / "job")
    with agents(1, 3) as job:
        store = job.new(job="another")
        first = new(job, arguments=["--dir", str(place)])
        meet([first])
        found = {str(place): arena_of(place, tmp_path / "arena"), "s3://bucket/run": tmp_path / "arena"}
        first.admission.arenas = lambda: found
        records = first._records
        known = [{"path": str(place), "mark": "0" * 32, "options": ["--dir"]}]
        until(lambda: records.first(first.round).get("directories") == known, "it is announced while the round lasts")
        second = assert_joins(job, [first])
        first.leave()
        ended([second])
        meet([second])  # its own workers have opened nothing yet
        second.announce_server("")
        assert second._records.at(second._records.connection).first(second.round).get("directories") == known
        assert store._endpoints.server is not None


def test_an_announcement_that_describes_no_directory_refuses_nobody():
    strange: list[Any] = [None, 3, "x", [3], [{"path": 1}], [{"path": "/x", "mark": "0"}]]
    with members_of(1, most=9) as (job, members):
        records = members[0]._records
        members[0]._alive.each_look = lambda store, round: None
        for entries in (*strange, [{"path": "/x", "mark": "0", "options": 1}]):
            records.announce_first(members[0].round.name, {"directories": entries})
            members.append(assert_joins(job, members))
