"""Consecutive rounds of ranks in one store, as under torchrun: no rank receives messages of earlier rounds."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from fastckpt._core.client import job_store
from fastckpt._core.client.collective import Agreement
from fastckpt._core.client.job_store import job_store_if_met
from tests.support.counting_store import CountingStore

WORLD = 3
Job = Callable[[int], Any]
_FORK = multiprocessing.get_context("fork")


class Rounds:
    """Rounds of ranks, each of which is a process, in one store that outlives them."""

    def __init__(self) -> None:
        # In a process of its own: a rank that is forked while the server's thread looks up a name hangs at its first
        # lookup, since the resolver's lock is then held for good.
        here, there = _FORK.Pipe(duplex=False)
        self._server = _FORK.Process(target=self._serve, args=(there,))
        self._server.start()
        self._port = here.recv()
        self._store = dist.TCPStore("127.0.0.1", self._port, timeout=timedelta(seconds=60))
        self.number = 0
        self.ranks: list[Any] = []

    def close(self) -> None:
        """End the store."""
        del self._store  # and its socket with it
        self._server.kill()
        self._server.join()

    @staticmethod
    def _serve(port: Any) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
        port.send(store.port)
        signal.pause()

    def start(self, job: Job) -> list[Any]:
        """What the job returns in each rank; "killed" of one that was."""
        self.number += 1
        for key in self.addresses():  # else gloo itself fails to connect
            self._store.delete_key(key)
        pipes = [_FORK.Pipe(duplex=False) for _ in range(WORLD)]
        self.ranks = ranks = [
            _FORK.Process(target=self._rank, args=(job, rank, pipes[rank][1])) for rank in range(WORLD)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(60)
        codes = [each.exitcode for each in ranks]
        for each in ranks:
            each.kill()
            each.join()
        assert set(codes) <= {0, -signal.SIGKILL}, "a rank hangs, or has failed"
        return [here.recv() if code == 0 else "killed" for (here, _), code in zip(pipes, codes, strict=True)]

    def form(self, rank: int) -> None:
        """Form a process group in the store."""
        dist.init_process_group("gloo", store=self.client(), rank=rank, world_size=WORLD)

    def client(self) -> dist.Store:
        """A client of the store; the tests' processes each make one."""
        client = dist.TCPStore("127.0.0.1", self._port, timeout=timedelta(seconds=60))
        self.counts = CountingStore(client, under="fastckpt/meet")
        return self.counts

    def _rank(self, job: Job, rank: int, answer: Any) -> None:
        os.environ |= {"RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        self.form(rank)
        answer.send(job(rank))
        dist.barrier()
        dist.destroy_process_group()

    def addresses(self) -> list[str]:
        """Where gloo says how a rank is reached."""
        return [key for key in self._store.list_keys() if "//cpu//" in key]


@pytest.fixture
def rounds() -> Iterator[Rounds]:
    found = Rounds()
    yield found
    found.close()


def test_no_rank_receives_messages_of_killed_ranks(rounds: Rounds) -> None:
    """They were killed as all had spoken, as one had spoken a round ahead, and before all had met."""

    def killed(rank: int) -> None:
        dist.new_group([0, 1])
        ranks = Agreement("resume")
        for number in range(rounds.number):
            ranks.gather(["dead", rank, number])
        if rank == 1:
            ranks.send(["dead", rank, "ahead"])
            ranks.leave()
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    def alone(rank: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        if rank == 2:  # the first two have come by then, and nobody has confirmed the name
            store.wait(["fastckpt/meet/name"], timedelta(seconds=60))
            name = store.get("fastckpt/meet/name").decode().split('"')[1]
            store.wait([f"fastckpt/meet/{name}/1"], timedelta(seconds=60))
            for each in (*rounds.ranks[:2], multiprocessing.current_process()):
                os.kill(each.pid, signal.SIGKILL)
        Agreement("resume")

    def heard(rank: int) -> list[Any]:
        ranks = Agreement("resume")
        return [ranks.gather(["alive", rank, number]) for number in range(3)]

    for _ in range(2):
        assert rounds.start(killed) == ["killed"] * WORLD
        assert rounds.addresses() == [], "those of gloo, which would hinder the next ones"
    assert rounds.start(alone) == ["killed"] * WORLD
    assert rounds.start(heard) == [[[["alive", rank, number] for rank in range(WORLD)] for number in range(3)]] * WORLD


def test_a_rank_that_does_not_come_is_named_in_the_log(rounds: Rounds) -> None:
    def job(rank: int) -> list[str]:
        told: list[str] = []
        job_store.PATIENCE = 0.2
        job_store.logger.addFilter(lambda record: bool(told.append(record.getMessage())))
        time.sleep(0.6 * (rank == 2))
        Agreement("resume")
        return told

    first, *others = rounds.start(job)
    assert others == [[], []]
    assert len(first) == 1 and "still waiting for rank 2 after 0.2 s, and up to 3600 s" in first[0]


def test_a_second_process_group_in_one_process_uses_fresh_keys(rounds: Rounds) -> None:
    """Also with ranks that have agreed on more in another one before."""

    def job(rank: int) -> list[Any]:
        heard = []
        for group in range(3):
            ranks = Agreement("resume")
            heard.append(ranks.gather([group, rank]))
            if rank == 1:
                ranks.send("ahead")  # and so has another count than the others
            dist.barrier()
            dist.destroy_process_group()
            rounds.form(rank)
            assert job_store_if_met("any") is None
        return heard

    assert rounds.start(job) == [[[[group, rank] for rank in range(WORLD)] for group in range(3)]] * WORLD


def test_to_meet_costs_six_messages_for_each_rank(rounds: Rounds) -> None:
    """However late a rank is; the second round removes what the first one has left."""

    def job(rank: int) -> int:
        time.sleep(0.2 * (rank == WORLD - 1))
        Agreement("resume")
        return rounds.counts.requests.total()

    assert [sum(rounds.start(job)) for _ in range(2)] == [6 * WORLD + 2, 6 * WORLD + 4]
