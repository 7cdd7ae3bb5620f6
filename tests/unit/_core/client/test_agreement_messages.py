"""Messages, errors and departures of agreements, whose ranks are threads with a client each of a real store."""

import gc
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fastckpt._core.client import collective, mailbox
from fastckpt._core.client.collective import Agreement, PeerDeparted, PeerFailed
from fastckpt._core.client.job_store import JobRanks
from fastckpt.errors import BadCheckpoint, FastckptError

DEADLINE = 120
LENGTHS = (5000, 1, 2500)
Job = Callable[[Agreement], Any]


class Ranks:
    """Ranks of one job; each is a thread with its own client of the store."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._kind, self._folder = kind, folder

    def _store(self, world: int) -> dist.Store:
        if self._kind == "file":
            return dist.FileStore(str(self._folder / "store"), world)
        return dist.TCPStore("127.0.0.1", self._server.port, timeout=timedelta(seconds=DEADLINE))

    def start(self, world: int, job: Job) -> list[Any]:
        """What the job returns or raises in each rank."""
        stores = [self._store(world) for _ in range(world)]
        results: list[Any] = [None] * world

        def run(rank: int) -> None:
            try:
                results[rank] = job(Agreement("resume", ranks=JobRanks("", stores[rank], rank, world)))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(DEADLINE)
            assert not each.is_alive(), "a rank hangs"
        return results

    def close(self) -> None:
        """Close the sockets."""
        del self._server
        gc.collect()

    def keys(self) -> int:
        return int(self._server.num_keys())


@pytest.fixture
def ranks(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(collective.Agreement, "_all_rounds", type(Agreement._all_rounds)(collective._Rounds))
    made = Ranks(getattr(request, "param", "tcp"), tmp_path)
    yield made
    made.close()


def rank_of(agreement: Agreement) -> int:
    return agreement._ranks.rank


@pytest.mark.parametrize("ranks", ["tcp", "file"], indirect=True)
def test_values_larger_than_a_store_value_are_received_whole(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "PIECE", 1000)
    monkeypatch.setattr(mailbox, "MOST_READ", 2)

    def job(agreement: Agreement) -> list[Any]:
        rank, heard = rank_of(agreement), []
        for length in LENGTHS:
            heard.append(agreement.gather([rank, "x" * length * rank]))
            heard.append(agreement.send([rank, "y" * length * rank])())
        return heard

    expected = [[[rank, of * length * rank] for rank in range(3)] for length in LENGTHS for of in "xy"]
    assert ranks.start(3, job) == [expected] * 3


def test_agreements_leave_only_what_the_next_one_removes(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of several names do not wait for each other: the first rank has heard both before the other hears one."""
    monkeypatch.setattr(mailbox, "PIECE", 10)
    together, counts = threading.Barrier(2), []

    def job(agreement: Agreement) -> None:
        rank, other = rank_of(agreement), agreement.sibling("other")
        for step in range(6):
            agreement.gather("x" * 100)
            first, second = agreement.send("y" * 100), other.send([step, rank])
            heard = [second(), first()] if rank == 0 else [first(), second()][::-1]
            assert heard == [[[step, 0], [step, 1]], ["y" * 100] * 2]
            together.wait(DEADLINE)
            if rank_of(agreement) == 0:
                counts.append(ranks.keys())
            together.wait(DEADLINE)

    assert ranks.start(2, job) == [None, None]
    assert len(set(counts[1:])) == 1


def test_a_defect_of_the_deciding_rank_ends_the_wait_of_the_others(ranks: Ranks) -> None:
    first, *others = ranks.start(3, lambda agreement: agreement.decide(0, lambda values: object()))
    assert isinstance(first, TypeError) and not isinstance(first, FastckptError)
    assert [(type(each), "rank 0 has failed to decide" in str(each)) for each in others] == [(FastckptError, True)] * 2


@pytest.mark.parametrize(("failing", "rounds"), [({0, 2}, 1), ({1, 2}, 0)])
def test_what_ranks_raise_between_two_rounds_is_raised_by_all_which_are_in_step_then(
    ranks: Ranks, failing: set[int], rounds: int
) -> None:
    """Also if the others have rounds to come before the end, and in a block within a block."""

    def job(agreement: Agreement) -> list[Any]:
        rank, heard = rank_of(agreement), list[Any]()
        for number in range(3):
            try:
                with agreement.sharing_errors(), agreement.sharing_errors():
                    heard.append(agreement.gather(number))
                    if number == 1 and rank in failing:
                        raise BadCheckpoint(f"bad for {rank}")
                    heard += [agreement.gather([number, each]) for each in range(rounds)]
            except (BadCheckpoint, PeerFailed) as error:
                heard.append(f"{type(error).__name__}: {error}")
        return heard

    for rank, heard in enumerate(ranks.start(3, job)):
        [error] = [each for each in heard if isinstance(each, str)]
        each_of = [f"rank {each}: BadCheckpoint: bad for {each}" for each in failing]
        first = "rank 0" if 0 in failing else "; ".join(each_of)
        assert error.startswith(f"BadCheckpoint: bad for {rank}" if rank in failing else f"PeerFailed: {first}")
        heard.remove(error)
        later = {number: [[[number, of]] * 3 for of in range(rounds) if number != 1] for number in range(3)}
        assert heard == [each for number in range(3) for each in ([number] * 3, *later[number])]


def test_a_rank_that_does_not_come_in_time_is_named(ranks: Ranks) -> None:
    has_given_up = threading.Event()

    def job(agreement: Agreement) -> Any:
        if rank_of(agreement) == 1:
            has_given_up.wait(DEADLINE)
            return None
        try:
            return agreement.gather(0, within=0.2)
        finally:
            has_given_up.set()

    first, _ = ranks.start(2, job)
    assert isinstance(first, dist.DistStoreError) and "rank 1 did not come within 0.2 s" in str(first)


@pytest.mark.parametrize(("way", "leaver"), [("gather", 0), ("send", 2)])
def test_all_waiting_ranks_learn_of_a_rank_that_left(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, leaver: int, way: str
) -> None:
    """Also those that come when it has long left; what it sent before is received."""
    monkeypatch.setattr(mailbox, "GLANCE", timedelta(seconds=0.1))
    has_left = threading.Event()

    def job(agreement: Agreement) -> list[Any]:
        rank = rank_of(agreement)
        heard: list[Any] = [agreement.send(rank)(), agreement.gather(rank)]
        answers = agreement.send(rank)
        if rank == leaver:
            agreement.leave()
            has_left.set()
            return [*heard, answers()]
        if rank == 1:
            has_left.wait(DEADLINE)
        heard.append(answers())
        for each in (agreement, agreement.sibling("persists")):
            with pytest.raises(PeerDeparted, match=f"rank {leaver} has closed"):
                each.gather(rank) if way == "gather" else each.send(rank)()
        return heard

    assert ranks.start(4, job) == [[[0, 1, 2, 3]] * 3] * 4


def test_the_list_of_a_rank_that_left_while_it_made_it_is_made_by_another(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "GLANCE", timedelta(seconds=0.1))
    others = threading.Barrier(3)

    def job(agreement: Agreement) -> Any:
        rank = rank_of(agreement)
        if rank < 2:
            answers = agreement.send(rank)
            others.wait(DEADLINE)
            return answers()
        others.wait(DEADLINE)
        agreement._mailbox.put("sent/2", [0, rank])  # as `send` does, and is interrupted then
        agreement._mailbox.add("sent")
        agreement.leave()
        return None

    assert ranks.start(3, job) == [[0, 1, 2], [0, 1, 2], None]
