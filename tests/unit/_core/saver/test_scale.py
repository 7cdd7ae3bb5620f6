"""Work of the saver for a save: it grows with the ranks of its node, not with their square."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fastckpt._core.client.connection import SaverClient
from fastckpt._core.client.save_results import TO_DISK, SaveRequest
from fastckpt._core.client.saver_options import saver_options
from fastckpt._core.config import RankInfo, Settings
from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc.messages import Granted
from fastckpt._core.memory import records, slots
from fastckpt._core.saver.server import Saver
from tests.e2e.ddp.conftest import until

FEW, MANY = 4, 16


class Node:
    """Ranks that speak to a saver as workers do, and copy nothing."""

    def __init__(self, directory: Path, world: int, opened: ExitStack) -> None:
        self.saver = Saver(Settings.from_environment())
        self.saver.start()
        opened.callback(self.saver.close)
        asked, address = saver_options(str(directory), None, "never"), self.saver.address
        self.links = []
        for rank in range(world):
            place = RankInfo(rank=rank, local_rank=rank, world_size=world, local_world_size=world, agent=address)
            self.links.append(SaverClient(asked, place, address))
            opened.callback(self.links[-1].close)
        self.sizes = [{f"rank_{rank}.pt": 4096} for rank in range(world)]

    @property
    def coordinator(self):
        (coordinator,) = self.saver._coordinators.values()
        return coordinator

    def begin(self, step: int, *, room: bool) -> Path:
        """All ranks begin a save, asking for room or not; the slot that they are given."""
        for link, sizes in zip(self.links, self.sizes, strict=True):
            link.begin(SaveId(link.history, step), sizes if room else {})
            answer = link.slot()
            assert isinstance(answer, Granted), answer
        return Path(answer.slot)

    def commit(self, step: int, slot: Path, rank: int, *, persist: bool = False, tell: bool = True) -> None:
        link = self.links[rank]
        save = SaveId(link.history, step)
        slots.commit(slot, rank, slots.SlotDone(save, self.sizes[rank], {"world_size": len(self.links), "rank": rank}))
        if tell:
            link.committed(save, SaveRequest(persist=persist))
            link.status()  # answered after that

    def save(self, step: int, *, persist: bool = False, room: bool = False) -> Path:
        slot = self.begin(step, room=room)
        for rank in range(len(self.links)):
            self.commit(step, slot, rank, persist=persist)
        assert slots.read(slot).committed == SaveId(1, step)
        return slot

    def settle(self) -> None:
        until(lambda: not self.coordinator._reservations._ahead, "room in all slots")
        until(lambda: not self.links[0].status().waiting, "the persist")


@contextmanager
def node(directory: Path, world: int) -> Iterator[Node]:
    with ExitStack() as opened:
        yield Node(directory, world, opened)


@pytest.fixture
def looks(monkeypatch) -> Counter[str]:
    """How often the process reads a record, or looks at a file."""
    found: Counter[str] = Counter()

    def counted(kind: str, owner: object, name: str) -> None:
        real = getattr(owner, name)

        def look(*args, **kwargs):
            found[kind] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, look)

    counted("records", records, "read_small")
    counted("files", os, "stat")
    return found


def test_looks_of_a_save_grow_no_faster_than_the_ranks(tmp_path: Path, looks: Counter[str]):
    """For the first save, ranks ask for room one after the other, and that of all slots is counted for each."""
    found = []
    for world in (FEW, MANY):
        with node(tmp_path / str(world), world) as ranks:
            counts = []
            for step in range(1, 6):
                looks.clear()
                ranks.save(step, room=step < 4, persist=step == 5)
                ranks.settle()
                counts.append(looks.copy())
            first, *_, later, persisted = counts
            found.append((first["files"], later["files"], later["records"], persisted["records"]))
    few, many = found
    assert min(few) >= FEW
    # How often a save that waits interrupts what is reserved ahead differs; a square would be four times as much.
    assert many[0] / MANY < 3 * few[0] / FEW
    for one, other in zip(few[1:], many[1:], strict=True):
        assert other <= one * MANY / FEW, "four times the ranks, at most four times the work"


def test_a_late_commit_message_of_a_rank_completes_the_save_and_one_without_a_record_does_not(tmp_path: Path):
    with node(tmp_path, 2) as ranks:
        slot = ranks.begin(1, room=True)
        ranks.links[0].committed(SaveId(1, 1), TO_DISK)
        ranks.commit(1, slot, 1)
        assert ranks.links[0].status().waiting == 0 and ranks.coordinator.newest() is None
        ranks.commit(1, slot, 0)
        assert ranks.coordinator.newest().path == slot
