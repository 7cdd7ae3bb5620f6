"""Four agents that keep parity of each other's large files, each with two saves in its slots."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.memory.parity_records import BLOCK, parity_place, read_parity
from fastckpt._core.policy.replicas.parity_layout import pieces, ranges_for
from fastckpt._core.saver.peers.common_saves import CommonSave
from fastckpt._core.saver.peers.file_transfer import SaveName
from fastckpt._core.saver.peers.parity_files import ParityFiles
from fastckpt._core.saver.peers.parity_rebuild import rebuild
from fastckpt._core.saver.peers.parity_transfer import PARITY, send_chunk
from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
from fastckpt._core.saver.peers.replica_transfer import LargeFile
from fastckpt._core.saver.slot import Slot
from fastckpt._core.storage.local.stored import digest
from tests.unit._core.saver.peers.agents import SECRET, Agent, name_of, write_save

GROUP = ("a", "b", "c", "d")
OLD, NEW = name_of(5), name_of(6)
PIECE = 1 << 16
SIZES = {"a": (5 * PIECE + 3, 7), "b": (2 * PIECE,), "c": (), "d": (9 * PIECE, PIECE // 2, 1)}


class Member(Agent):
    """An agent with two saves in its slots, each with large files of its own."""

    def __init__(self, folder: Path, id: str, sizes: Sequence[int], rank: int | None = None) -> None:
        self.id, self.sizes, self.rank = id, sizes, GROUP.index(id) if rank is None else rank
        self.files = {save: self._save(save, folder / f"slot-{n}") for n, save in enumerate((OLD, NEW))}
        self.in_use = False
        own = [Slot(folder / f"slot-{number}") for number in range(2)]
        super().__init__(folder, own, parity=ParityFiles(folder, set, lambda: self.in_use, PIECE))

    def _save(self, save: SaveName, slot: Path) -> list[LargeFile]:
        slot.mkdir(parents=True)
        files = {f"shard_{self.id}{number}.pt": os.urandom(size) for number, size in enumerate(self.sizes)}
        write_save(slot, save.id.step, files, self.rank, 4)
        return [LargeFile(name, slot / name, len(data), digest(slot / name)) for name, data in files.items()]


class Group:
    """Four agents in one round."""

    def __init__(self, folder: Path, sizes: Mapping[str, Sequence[int]]) -> None:
        self.members = {id: Member(folder / id, id, sizes[id]) for id in GROUP}
        self.ids: tuple[str, ...] = GROUP
        self.assume(GROUP)

    def assume(self, ids: Sequence[str]) -> None:
        self.ids = tuple(sorted(ids))
        peers = [Peer(id, id, self.members[id].address) for id in ids]
        for number, id in enumerate(ids):
            self.members[id].peers.assume(PeerRound(peers, number, SECRET))

    def link(self, id: str) -> closing[SealedConnection]:
        return self.members[id].link()

    def give(self, save: SaveName, member: str, holder: str, common: CommonSave = CommonSave()) -> int:  # noqa: B008
        with self.link(holder) as link:
            return send_chunk(link, save, self.members[member].files[save], self.ids, (member, holder), common)

    def give_all(self, save: SaveName, common: CommonSave = CommonSave()) -> None:  # noqa: B008
        pairs = [(member, holder) for member in self.ids for holder in self.ids if member != holder]
        with ThreadPoolExecutor(len(pairs)) as pool:
            for work in [pool.submit(self.give, save, *pair, common) for pair in pairs]:
                work.result()

    def lose(self, *ids: str) -> None:
        for id in ids:
            self.members[id].peers.close()
        self.assume([id for id in self.ids if id not in ids])

    def rebuild(self, save: SaveName, lost: str, into: Path, group: tuple[str, ...] = GROUP) -> dict[str, str]:
        """Have the other members rebuild what one has lost."""
        holders = {id: self.members[id].address for id in group if id != lost}
        return rebuild(save, lost, group, into, holders, SECRET)

    def parity(self, save: SaveName, holder: str, group: tuple[str, ...] = GROUP) -> Path:
        """The block of whole parity, which has to be there."""
        place = parity_place(self.members[holder].arena, save.id, save.attempt, group)
        assert read_parity(place) is not None
        return place / BLOCK

    def has_parity(self, save: SaveName, holder: str, group: tuple[str, ...] = GROUP) -> bool:
        return read_parity(parity_place(self.members[holder].arena, save.id, save.attempt, group)) is not None

    def request(self, save: SaveName, member: str, holder: str) -> dict[str, object]:
        named = [[file.name, file.size, file.digest] for file in self.members[member].files[save]]
        return save.request(PARITY, group=[*GROUP], member=member, holder=holder, files=named, common=[])

    def pieces(self, save: SaveName, member: str, holder: str) -> list[bytes]:
        files = {file.name: file for file in self.members[member].files[save]}
        ranges = ranges_for(GROUP, member, holder, [(name, file.size) for name, file in files.items()])
        return [
            b"".join(files[name].path.read_bytes()[at : at + length] for name, at, length in piece)
            for piece in pieces(ranges, PIECE)
        ]


def assert_rebuilt(group: Group, save: SaveName, lost: str, into: Path, of: tuple[str, ...] = GROUP) -> None:
    files = group.members[lost].files[save]
    assert group.rebuild(save, lost, into, of) == {file.name: file.digest for file in files}
    found = {path.name: path.read_bytes() for path in into.glob("*.pt")}
    assert found == {file.name: file.path.read_bytes() for file in files}


def digest_bytes(folder: Path, data: bytes) -> str:
    (folder / "data").write_bytes(data)
    return digest(folder / "data")
