"""Parity among four agents: each loss is rebuilt as it was, whatever happens on the way, or refused."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.memory.held_saves import held_saves, keep
from fastckpt._core.policy.peer_sources import ParityHolding
from fastckpt._core.resume.candidates import parity_holdings
from fastckpt._core.saver.peers import replica_sender
from fastckpt._core.saver.peers.common_saves import CommonSave
from fastckpt._core.saver.peers.parity_files import ChunkRequest, ParityFiles
from fastckpt._core.saver.peers.parity_rebuild import REBUILD, _agreed, _Source
from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
from fastckpt._core.saver.peers.replica_sender import ReplicaSender
from fastckpt._core.saver.peers.replica_transfer import DAMAGED, READY
from fastckpt._core.saver.stats import ReplicaCounts
from fastckpt.errors import ArenaTooSmall, BadCheckpoint, FastckptError, ProtocolError
from tests.support.largest_file import largest_file
from tests.support.tables import for_each
from tests.unit._core.saver.peers.agents import SECRET, flip, name_of
from tests.unit._core.saver.peers.parity_group import GROUP, NEW, OLD, PIECE, Group, assert_rebuilt, digest_bytes

SMALL = 1 << 17
"""Larger files count as large here."""


def test_the_files_of_each_lost_node_are_rebuilt_from_parity_as_long_as_the_longest_chunk(group: Group, tmp_path: Path):
    group.give_all(NEW)
    for holder in GROUP:
        lengths = [sum(map(len, group.pieces(NEW, member, holder))) for member in GROUP if member != holder]
        assert group.members[holder].parity.bytes() == max(lengths)
    for lost in GROUP:
        (tmp_path / "into" / lost).mkdir(parents=True)
        assert_rebuilt(group, NEW, lost, tmp_path / "into" / lost)
    group.lose("b", "d")
    left = {id: group.members[id].address for id in ("a", "c")}
    with group.link("a") as link, pytest.raises(ProtocolError, match="b is lost, too"):
        link.ask(NEW.request(REBUILD, member="d", group=[*GROUP], addresses=left))


def test_a_loss_amid_a_renewal_falls_back_on_the_save_before(group: Group, tmp_path: Path):
    """Also on the parity of an agent that starts again, which keeps what is whole and begins the rest again."""
    group.give_all(OLD)
    for member, holder in (("a", "b"), ("b", "a"), ("d", "c"), ("c", "d"), ("d", "b")):
        group.give(NEW, member, holder, CommonSave(OLD.id))
    again, size = group.members["b"], group.parity(OLD, "b").stat().st_size
    again.parity.close()
    again.parity = ParityFiles(again.arena, set, lambda: False, PIECE)
    assert again.parity.bytes() > size
    again.parity.clear_away()
    assert again.parity.bytes() == size
    assert group.give(OLD, "a", "b") == 0 and group.give(NEW, "a", "b", CommonSave(OLD.id)) > 0
    group.lose("d")
    with pytest.raises(FastckptError, match="no whole parity"):
        group.rebuild(NEW, "d", tmp_path / "new")
    assert not [*(tmp_path / "new").glob("*")]
    assert_rebuilt(group, OLD, "d", tmp_path / "old")


def test_pages_of_an_older_save_serve_a_newer_one_and_leave_nothing_in_it(group: Group, tmp_path: Path):
    third = name_of(7)
    for member in group.members.values():
        member.files[third] = member.files[OLD]
    group.give_all(OLD)
    before = {id: group.parity(OLD, id).stat().st_ino for id in GROUP}
    group.give_all(NEW, CommonSave(OLD.id))
    group.give_all(third, CommonSave(NEW.id))
    for id in GROUP:
        block = group.parity(third, id)
        assert block.stat().st_ino == before[id] and not group.has_parity(OLD, id)
        chunks = [b"".join(group.pieces(OLD, each, id)) for each in GROUP if each != id]
        assert block.read_bytes() == xor(chunks, block.stat().st_size)


def xor(chunks: list[bytes], size: int) -> bytes:
    found = 0
    for chunk in chunks:
        found ^= int.from_bytes(chunk.ljust(size, b"\0"), "big")
    return found.to_bytes(size, "big")


def test_a_chunk_that_came_damaged_was_cut_off_or_comes_twice_is_in_the_parity_once(group: Group, tmp_path: Path):
    found = group.pieces(NEW, "d", "b")
    assert len(found) > 2
    digests = [{"digest": digest_bytes(tmp_path, piece)} for piece in found]
    assert group.give(NEW, "a", "b") == sum(map(len, group.pieces(NEW, "a", "b"))) > 0
    with group.link("b") as link:
        link.ask(group.request(NEW, "d", "b"))
        link.send_bytes(bytes([found[0][0] ^ 1]) + found[0][1:])
        assert link.ask(digests[0]) == {"state": DAMAGED}
    with group.link("b") as link:
        assert link.ask(group.request(NEW, "d", "b")) == {"state": READY, "first": 0, "piece": PIECE}
        link.send_bytes(found[0])
        link.ask(digests[0])
        link.send_bytes(found[1][: PIECE // 3])
    with group.link("b") as slow:
        slow.ask(group.request(NEW, "d", "b"))
        slow.send_bytes(found[1][:-1])
        assert group.give(NEW, "d", "b") == sum(map(len, found[1:])), "it goes on where it was"
        slow.send_bytes(found[1][-1:])
        with pytest.raises((ProtocolError, OSError)):
            slow.ask(digests[1])
    group.give_all(NEW)
    group.lose("d")
    assert_rebuilt(group, NEW, "d", tmp_path / "into")


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [
        ("file before its chunk was sent", BadCheckpoint, "was rebuilt with"),
        ("parity", (FastckptError, OSError), None),
        ("file of another", (FastckptError, OSError), None),
    ],
)
def test_damage_before_or_after_the_parity_was_made_is_noticed(
    group: Group, tmp_path: Path, what: str, error: Any, says: str | None
):
    if what.startswith("file before"):
        flip(group.members["d"].files[NEW][0].path, 12)
    group.give_all(NEW)
    if what == "parity":
        flip(group.parity(NEW, "b"), 12)
    elif what == "file of another":
        flip(group.members["a"].files[NEW][0].path, 12)
    group.lose("d")
    with pytest.raises(error, match=says):
        group.rebuild(NEW, "d", tmp_path / "into")
    assert not [*(tmp_path / "into").glob("*")]


def test_a_sender_learns_why_a_disk_has_not_taken_its_chunk_and_newer_parity_is_whole(group: Group):
    group.give(OLD, "d", "a")  # the longest: its place has room for the others
    with largest_file(PIECE // 2), pytest.raises(ArenaTooSmall, match=r"cannot be kept in .*File too large"):
        group.give(OLD, "b", "a")
    group.give_all(NEW)
    assert group.members["a"].parity.find(NEW.id, NEW.attempt, "b", GROUP)
    group.members["a"].files[NEW] = group.members["a"].files[OLD]
    with pytest.raises(ProtocolError, match="had other files"):  # than those whose chunk has come
        group.give(NEW, "a", "b")


@pytest.mark.parametrize(
    "group", [{"a": (SMALL + 5,), "b": (9,), "c": (SMALL + 1, 100), "d": (2 * SMALL, 3)}], indirect=True
)
def test_a_save_counts_for_a_node_when_all_others_of_its_group_have_its_chunks(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replica_sender, "SMALL", SMALL)
    peers = [Peer(id, id, group.members[id].address) for id in GROUP]
    for number, id in enumerate(GROUP):
        others = [peer for peer in peers if peer.id != id]
        round, counts = PeerRound(peers, number, SECRET, others, parity=True), ReplicaCounts()
        sender = ReplicaSender(NEW.directory, None, counts)
        sender.assume(round)
        [held] = [each for each in held_saves(tmp_path / id, [tmp_path / id / "slot-1"]) if each.id == NEW.id]
        assert sender.send(held, CommonSave(), round) is True
        assert counts.size == sum(file.size for file in group.members[id].files[NEW] if file.size > SMALL)
        sender.close()
    group.lose("d")
    large = [file for file in group.members["d"].files[NEW] if file.size > SMALL]
    assert group.rebuild(NEW, "d", tmp_path / "into") == {file.name: file.digest for file in large}
    assert (tmp_path / "into" / large[0].name).read_bytes() == large[0].path.read_bytes()


def test_a_node_reports_the_ranks_whose_files_its_parity_is_of(group: Group, tmp_path: Path):
    held = {id: held_saves(tmp_path / id, [tmp_path / id / "slot-1"])[0] for id in GROUP}
    assert parity_holdings(tmp_path / "b", held["b"]) == ()
    group.give_all(NEW)
    for id in ("a", "d"):  # as its small files come, with the records of its ranks
        keep(tmp_path / "b", NEW.id, NEW.attempt, held[id].parts, {}, {})
    [now] = held_saves(tmp_path / "b", [tmp_path / "b/slot-1"])
    names = {id: tuple(file.name for file in group.members[id].files[NEW]) for id in GROUP}
    expected = {"a": {0: names["a"]}, "c": {}, "d": {3: names["d"]}}
    assert parity_holdings(tmp_path / "b", now) == (ParityHolding(GROUP, "b", expected),)


def test_room_for_a_longer_chunk_leaves_what_is_in_the_xor_as_it_is():
    """In shared memory, whose pages are made large by a byte that is written to each, before anything else is."""
    arena = Path(os.environ["FASTCKPT_SHM_DIR"], "parity")
    arena.mkdir(mode=0o700)
    try:
        data = {"a": os.urandom(3 << 20), "b": os.urandom(5 << 20)}
        parity, group = ParityFiles(arena, set, lambda: False, 8 << 20), ("a", "b", "c")
        for member in ("a", "b"):
            files = ((f"{member}.distcp", 2 * len(data[member]), "0" * 32),)  # of which half is for this node
            place = parity.admit(ChunkRequest(NEW.id, NEW.attempt, group, "c", member, files))
            assert place is not None
            place.add(member, 0, memoryview(data[member]), "1" * 32)
            parity.came(place)
        (block,) = arena.rglob("block")
        assert block.read_bytes() == xor([*data.values()], 5 << 20)
        parity.close()
    finally:
        shutil.rmtree(arena)


@for_each(
    ("another size", "abc", (1, 1, 2)),
    ("too few", "ab", (1, 1)),
    ("one twice", "abb", (1, 1, 1)),
    ("a stranger", "abx", (1, 1, 1)),
)
def test_members_that_do_not_agree_on_the_files_of_a_lost_one_are_refused(holders: str, sizes: tuple[int, ...]):
    link: Any = None  # nobody is asked any more
    sources = [_Source(link, id, (("model.pt", size, "0" * 32),)) for id, size in zip(holders, sizes, strict=True)]
    with pytest.raises(ProtocolError, match="group of d do not agree"):
        _agreed(sources, tuple("abcd"), "d")
    agreed = [_Source(link, id, sources[0].files) for id in "cab"]
    assert _agreed(agreed, tuple("abcd"), "d") == sources[0].files
