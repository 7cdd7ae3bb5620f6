"""Parity while nodes of a group come and go: what is kept until when, what is refused, and what waits for what."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest

from fastckpt._core import metrics
from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.memory.parity_records import (
    ParityMember,
    ParityRecord,
    read_parity,
    write_parity,
)
from fastckpt._core.saver.peers import fetcher
from fastckpt._core.saver.peers.common_saves import CommonSave
from fastckpt._core.saver.peers.file_transfer import SaveName
from fastckpt._core.saver.peers.parity_files import ChunkRequest, ParityFiles
from fastckpt.errors import ArenaTooSmall, FastckptError
from tests.unit._core.saver.peers.parity_group import (
    GROUP,
    NEW,
    OLD,
    PIECE,
    SECRET,
    Group,
    Member,
    assert_rebuilt,
    flip,
)


@pytest.mark.parametrize(
    ("holders", "harm"),
    [
        ("dabc", lambda path: flip(path, 12)),
        ("dabc", lambda path: os.truncate(path, path.stat().st_size - 1)),
        ("dabc", Path.unlink),
        ("abc", None),
    ],
    ids=["damaged", "cut", "gone", "lost with its node"],
)
def test_a_file_that_its_node_cannot_give_is_rebuilt_by_the_others_which_give_theirs(
    group: Group, tmp_path: Path, holders: str, harm: Callable[[Path], None] | None
):
    group.give_all(NEW)
    [first, *_, unasked], there = group.members["d"].files[NEW], group.members["b"].files[NEW][0]
    slots.write_digests(first.path.parent, NEW.id, {file.name: file.digest for file in group.members["d"].files[NEW]})
    files = {file.name: file for file in [*group.members["d"].files[NEW], there] if file is not unasked}
    expected = {name: file.path.read_bytes() for name, file in files.items()}
    if harm is None:
        group.lose("d")
    sources = {name: [group.members[id].address for id in holders] for name in files}
    offers = fetcher.survey(NEW, sources, SECRET)
    if harm is not None:
        harm(first.path)
    found = fetcher.fetch_all(NEW, tmp_path / "into", sources, offers, SECRET)
    assert {path.name: path.read_bytes() for path in (tmp_path / "into").iterdir()} == expected
    assert found.digests == {name: file.digest for name, file in files.items()}
    assert found.sizes == {name: file.size for name, file in files.items()}
    with pytest.raises((FastckptError, OSError)):  # two of a group cannot be rebuilt
        fetcher.fetch_all(NEW, tmp_path / "nothing", sources, offers[:-1], SECRET)
    assert not (tmp_path / "nothing" / first.name).exists()


LATER = ("a", "b", "c", "e")
in_both_media = pytest.mark.parametrize("medium", ["memory", "disk"], indirect=True)


def come_back(group: Group, tmp_path: Path) -> None:
    """Have a fresh node take the place of one that is lost, with the files that it had."""
    group.give_all(OLD)
    group.lose("d")
    fresh = group.members["e"] = Member(tmp_path / "e", "e", (), rank=3)
    fresh.files[OLD] = [replace(file, path=tmp_path / "e/slot-0" / file.name) for file in group.members["d"].files[OLD]]
    assert_rebuilt(group, OLD, "d", tmp_path / "e/slot-0")
    group.assume(LATER)


@pytest.mark.parametrize("save", [OLD, NEW], ids=["the save that was resumed", "the next one"])
def test_a_fresh_node_that_is_lost_amid_the_next_renewal_is_rebuilt_from_parity_of_the_group_before(
    group: Group, tmp_path: Path, save: SaveName
):
    come_back(group, tmp_path)
    known = CommonSave(OLD.id, is_replicated=False)
    for member in "bce":
        group.give(save, member, "a", known)  # whole at one node
    group.give(save, "a", "b", known)  # begun at another
    assert group.has_parity(save, "a", LATER) and not group.has_parity(save, "b", LATER)
    group.lose("e")
    assert_rebuilt(group, OLD, "d", tmp_path / "into")


@in_both_media
def test_parity_of_the_group_before_is_released_when_all_have_that_of_the_later_one(group: Group, tmp_path: Path):
    come_back(group, tmp_path)
    group.give_all(OLD)
    blocks = {id: group.parity(OLD, id, LATER).stat().st_ino for id in LATER}
    assert all(group.has_parity(OLD, id) for id in "abc")
    group.give_all(NEW, CommonSave(OLD.id, is_replicated=True))
    assert not any(group.has_parity(OLD, id) for id in "abc")
    assert {id: group.parity(OLD, id, LATER).stat().st_ino for id in LATER} == blocks
    group.lose("e")
    assert_rebuilt(group, OLD, "e", tmp_path / "old", LATER)
    assert_rebuilt(group, NEW, "e", tmp_path / "new", LATER)


@pytest.mark.parametrize("in_use", [False, True])
def test_no_more_than_two_places_are_kept_through_renewals_that_break_off(group: Group, tmp_path: Path, in_use: bool):
    come_back(group, tmp_path)
    group.members["b"].in_use = in_use
    size = max(group.parity(OLD, id).stat().st_size for id in "abc")
    for number in range(7, 12):
        save = SaveName(OLD.directory, SaveId(1, number), "token")
        for id in "abc":
            group.members[id].files[save] = group.members[id].files[OLD]
        group.give(save, "a", "b", CommonSave(OLD.id))
        assert group.members["b"].parity.bytes() <= 2 * size
    group.lose("e")
    assert_rebuilt(group, OLD, "d", tmp_path / "into")


@pytest.fixture
def allocation() -> Iterator[tuple[threading.Event, threading.Event]]:
    """The first memory for parity is made slowly: that it has begun, and what lets it go on."""
    reached, go = threading.Event(), threading.Event()

    def pause(phase: str, fields: Mapping[str, object]) -> None:
        if phase == "parity.allocate" and not reached.is_set():
            reached.set()
            go.wait(30)

    metrics.observe(pause)
    yield reached, go
    go.set()
    metrics.unobserve(pause)


def test_other_chunks_come_while_memory_for_one_is_being_made(group: Group, allocation):
    """Of another save, and of the same one: neither waits for the pages."""
    reached, go = allocation
    reached.set()
    assert group.give(OLD, "a", "b") > 0
    reached.clear()
    with ThreadPoolExecutor(1) as pool:
        longer = pool.submit(group.give, OLD, "d", "b")
        assert reached.wait(20)
        assert group.give(OLD, "a", "b") == 0 == group.give(OLD, "c", "b")
        assert group.members["b"].parity.bytes() > 0 and not longer.done()
        go.set()
        assert longer.result(20) > 0
    assert group.has_parity(OLD, "b")


def test_a_place_that_is_released_while_its_memory_is_made_gives_its_pages_to_no_other(
    group: Group, tmp_path: Path, allocation
):
    reached, go = allocation
    with ThreadPoolExecutor(2) as pool:
        overtaken = pool.submit(group.give, OLD, "d", "b")
        assert reached.wait(20)
        newer = pool.submit(group.give, NEW, "c", "b")  # an empty chunk, which needs no memory
        wait([newer], 2)
        go.set()
        newer.result(20)
        with pytest.raises((FastckptError, OSError)):
            overtaken.result(20)
    assert group.members["b"].parity.bytes() == 0
    group.give_all(NEW)
    group.lose("d")
    assert_rebuilt(group, NEW, "d", tmp_path / "into")


def test_the_files_of_64_ranks_of_each_of_16_nodes_fit_into_the_records(tmp_path: Path):
    ids = tuple(f"{number:032x}" for number in range(16))
    record = ParityRecord(ids, ids[0], PIECE)
    for id in ids[1:]:
        files = tuple((f"zero_pp_rank_{rank}_mp_rank_{n:02}_optim_states.pt", 15 * PIECE, "f" * 32)
                      for rank in range(64) for n in range(16))  # fmt: skip
        record.members[id] = ParityMember(tuple(sorted(files)), ["0" * 32] * 1024)
        record.demand_short(id)
    write_parity(tmp_path, record)
    assert read_parity(tmp_path) == record
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > 1 << 20


@pytest.mark.parametrize("sizes", [(32000 * 3 * PIECE,), (9,) * 20_000], ids=["pieces", "files"])
def test_what_a_record_cannot_hold_is_refused_by_name_before_memory_is_made(tmp_path: Path, sizes: tuple[int, ...]):
    parity = ParityFiles(tmp_path, set, lambda: False, PIECE)
    files = tuple((f"shard_{number}.pt", size, "0" * 32) for number, size in enumerate(sizes))
    with pytest.raises(ArenaTooSmall, match=r"record of parity would have [0-9]+ bytes.*larger groups"):
        parity.admit(ChunkRequest(NEW.id, NEW.attempt, GROUP, "a", "b", files))
    assert parity.bytes() == 0
    parity.close()
