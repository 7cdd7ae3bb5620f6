"""Files between two agents: each arrives as it was committed, or the next source is asked."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastckpt._core.memory import slots
from fastckpt._core.memory.held_saves import held_saves
from fastckpt._core.saver.peers import fetcher, file_transfer
from fastckpt._core.saver.slot import Slot
from fastckpt._core.storage.local.stored import digest
from fastckpt.errors import BadCheckpoint, FastckptError, ProtocolError
from tests.unit._core.saver.peers.agents import SECRET, Agent, flip, link_to, name_of, relay, write_save

SAVE = name_of(5)
SIZE = (5 << 20) + 3


class Source(Agent):
    """An agent that holds a save of two ranks on two nodes."""

    def __init__(self, arena: Path) -> None:
        self.slot = arena / "slot-0"
        self.slot.mkdir(parents=True)
        write_save(self.slot, 5, {"model.pt": b"m" * SIZE, "rank_0.pt": b"r" * 100}, 0)
        self.model = self.slot / "model.pt"
        slots.write_digests(self.slot, SAVE.id, {path.name: digest(path) for path in self.slot.glob("*.pt")})
        super().__init__(arena, [Slot(self.slot)])


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Callable[..., Source]]:
    made: list[Source] = []

    def make() -> Source:
        made.append(Source(tmp_path / f"source-{len(made)}"))
        return made[-1]

    yield make
    for each in made:
        each.peers.close()


def fetched(into: Path, *given: Source) -> fetcher.FetchedFiles:
    wanted = {"model.pt": [source.address for source in given]}
    return fetcher.fetch_all(SAVE, into, wanted, fetcher.survey(SAVE, wanted, SECRET), SECRET)


FAULTS: dict[str, Callable[[Source], object]] = {
    "damaged": lambda source: flip(source.model, SIZE // 2),
    "cut short": lambda source: source.model.write_bytes(b"m"),
    "begun again": lambda source: slots.clear(source.slot),
    "hung up": lambda source: source.peers.close(),
}


def test_a_source_that_cannot_give_a_file_is_passed_over(
    sources: Callable[..., Source], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    for name, fault in FAULTS.items():
        first, second = sources(), sources()
        fault(first)
        files = fetched(tmp_path / name, first, second)
        assert (tmp_path / name / "model.pt").read_bytes() == second.model.read_bytes()
        assert files.digests == {"model.pt": digest(second.model)} and files.sizes == {"model.pt": SIZE}
        assert f"from {first.address}" in caplog.text
        fault(second)
        with pytest.raises((FastckptError, OSError)):
            fetched(tmp_path / "nothing", first, second)
        assert not (tmp_path / "nothing/model.pt").exists()


def test_a_byte_that_changes_on_its_way_is_noticed(sources: Callable[..., Source], tmp_path: Path):
    with (
        relay(sources().address, SIZE // 2, "flip", back=True) as address,
        link_to(address) as link,
        pytest.raises(BadCheckpoint, match="came damaged"),
    ):
        file_transfer.fetch(link, SAVE, "model.pt", SIZE, tmp_path / "into")
    assert [*(tmp_path / "into").iterdir()] == []


def test_only_files_of_the_save_are_given_and_none_is_kept_outside_of_it(
    sources: Callable[..., Source], tmp_path: Path
):
    source = sources()
    (held,) = held_saves(source.arena, [source.slot])
    with source.link() as link:
        for name in ("../owner", "/etc/passwd", "nothing.pt", 5, None):
            with pytest.raises(ProtocolError, match="is no file of step 5"):
                link.ask(SAVE.request("get", name=name))
        for name in ("../escape", "/tmp/escape", ".begin", "a/../../escape"):
            with pytest.raises(ProtocolError), source.link() as other:
                file_transfer.give(other, SAVE, held, {name: b"data"})
        assert link.ask(SAVE.request("list"))["files"].keys() == {"model.pt", "rank_0.pt"}
    assert not list(tmp_path.rglob("*escape*"))
