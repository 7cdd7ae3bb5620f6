"""Agreements of ranks that are processes, over a real store."""

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fastckpt._core.client.collective import Agreement, PeerDeparted

WORLD = 2
Job = Callable[[int], Any]


def in_ranks(tmp_path: Path, job: Job) -> list[Any]:
    """What the job returns in each of the ranks."""
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(job, rank, tmp_path / "store", found)) for rank in range(WORLD)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
        assert each.exitcode == 0, "a rank hangs, or has failed"
    said = dict(found.get() for _ in ranks)
    return [said[rank] for rank in range(WORLD)]


def _rank(job: Job, rank: int, store: Path, found: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    found.put((rank, job(rank)))
    dist.barrier()
    dist.destroy_process_group()


def test_agreements_under_several_names_do_not_wait_for_each_other(tmp_path: Path) -> None:
    def job(rank: int) -> list[Any]:
        one, other = Agreement("one"), Agreement("other")
        heard: list[Any] = []
        for step in range(5):
            first, second = one.send([step, rank]), other.send([-step, rank])
            if rank == 0:  # it has heard both before the other rank hears the first
                heard += [second(), first()]
                one.gather("on")
                continue
            time.sleep(0.05)
            heard += [second(), first()] if step % 2 else [first(), second()][::-1]
            one.gather("on")
        return heard

    first, second = in_ranks(tmp_path, job)
    assert first == second
    assert first[:2] == [[[0, 0], [0, 1]], [[0, 0], [0, 1]]]


def test_agreements_do_not_grow_the_store(tmp_path: Path) -> None:
    def job(rank: int) -> int:
        keys = []
        for _ in range(20):
            Agreement("resume").gather(rank)
            Agreement("pace").send(rank)()
            dist.barrier()
            keys.append(dist.distributed_c10d._get_default_store().num_keys())
            dist.barrier()
        return max(keys[10:]) - min(keys[10:])

    assert in_ranks(tmp_path, job) == [0, 0]


def test_waiting_for_a_rank_that_left_is_an_error_and_its_messages_are_received(tmp_path: Path) -> None:
    def job(rank: int) -> list[Any]:
        ranks = Agreement("pace")
        persists = ranks.sibling("persists")
        answers = persists.send(rank)
        if rank == 1:
            ranks.leave()
            return [*answers()]
        heard = [*answers()]
        for each in (ranks, persists):
            try:
                each.gather(rank)
            except PeerDeparted as error:
                heard.append(str(error))
        return heard

    assert in_ranks(tmp_path, job) == [[0, 1, "rank 1 has closed", "rank 1 has closed"], [0, 1]]
