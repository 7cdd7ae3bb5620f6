"""Parity while nodes of a group come and go: what is kept until when, what is refused, and what waits for what."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest

from fastckpt._core import metrics
from fastckpt._core.memory import slots
from fastckpt._core.saver.peers import fetcher
from fastckpt._core.saver.peers.common_saves import CommonSave
from fastckpt._core.saver.peers.file_transfer import SaveName
from fastckpt._core.saver.peers.parity_files import ChunkRequest, ParityFiles
from fastckpt.errors import ArenaTooSmall, FastckptError
from tests.unit._core.saver.peers.agents import SECRET, flip, name_of
from tests.unit._core.saver.peers.parity_group import GROUP, NEW, OLD, PIECE, Group, Member, assert_rebuilt


@pytest.mark.parametrize(
    ("holders", "harm"), [("dabc", lambda path: flip(path, 12)), ("abc", None)], ids=["damaged", "lost with its node"]
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


def test_no_more_than_two_places_are_kept_through_renewals_that_break_off(group: Group, tmp_path: Path):
    come_back(group, tmp_path)
    group.members["b"].in_use = True
    size = max(group.parity(OLD, id).stat().st_size for id in "abc")
    for number in range(7, 12):
        save = name_of(number)
        for id in "abc":
            group.members[id].files[save] = group.members[id].files[OLD]
        group.give(save, "a", "b", CommonSave(OLD.id))
        assert group.members["b"].parity.bytes() <= 2 * size
    group.lose("e")
    assert_rebuilt(group, OLD, "d", tmp_path / "into")


def test_a_place_that_is_released_while_its_memory_is_made_gives_its_pages_to_no_other(group: Group, tmp_path: Path):
    reached, go = threading.Event(), threading.Event()

    def pause(phase: str, fields: Mapping[str, object]) -> None:
        if phase == "parity.allocate" and not reached.is_set():
            reached.set()
            go.wait(30)

    metrics.observe(pause)
    with ThreadPoolExecutor(2) as pool:
        overtaken = pool.submit(group.give, OLD, "d", "b")
        assert reached.wait(20)
        newer = pool.submit(group.give, NEW, "c", "b")  # an empty chunk, which needs no memory
        wait([newer], 2)
        go.set()
        newer.result(20)
        with pytest.raises((FastckptError, OSError)):
            overtaken.result(20)
    metrics.unobserve(pause)
    assert group.members["b"].parity.bytes() == 0
    group.give_all(NEW)
    group.lose("d")
    assert_rebuilt(group, NEW, "d", tmp_path / "into")


def test_what_a_record_cannot_hold_is_refused_by_name_before_memory_is_made(tmp_path: Path):
    parity = ParityFiles(tmp_path, set, lambda: False, PIECE)
    for save, sizes in ((OLD, (32000 * 3 * PIECE,)), (NEW, (9,) * 20_000)):
        files = tuple((f"shard_{number}.pt", size, "0" * 32) for number, size in enumerate(sizes))
        with pytest.raises(ArenaTooSmall, match=r"record of parity would have [0-9]+ bytes.*larger groups"):
            parity.admit(ChunkRequest(save.id, save.attempt, GROUP, "a", "b", files))
        assert parity.bytes() == 0
    parity.close()
