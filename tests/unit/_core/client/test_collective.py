"""Agreements of ranks that are processes, over a real store."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fastckpt._core.client.collective import Agreement

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


def test_agreements_under_several_names_do_not_wait_for_each_other_nor_grow_the_store(tmp_path: Path) -> None:
    def job(rank: int) -> tuple[list[Any], int]:
        one, other, heard, keys = Agreement("one"), Agreement("other"), list[Any](), list[int]()
        for step in range(12):
            first, second = one.send([step, rank]), other.send([-step, rank])
            # The first rank has heard both before the other one hears the first.
            heard += [second(), first()] if rank == 0 or step % 2 else [first(), second()][::-1]
            one.gather("on")
            dist.barrier()
            keys.append(dist.distributed_c10d._get_default_store().num_keys())
            dist.barrier()
        return heard, max(keys[6:]) - min(keys[6:])

    first, second = in_ranks(tmp_path, job)
    assert first == second and first[1] == 0
    assert first[0][:2] == [[[0, 0], [0, 1]], [[0, 0], [0, 1]]]
