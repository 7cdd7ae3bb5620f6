"""Measures an agreement of all ranks, by their number: seconds and requests to the store of the process group.

    python benchmarks/agreement.py [--ranks 8 64 128 512] [--rounds 10] [--processes 16]

Ranks are threads of several processes, each with its own client of one TCPStore, as ranks of a job have. `decide` has
the first rank answer all, `gather` sends the values of all to each rank, and in "each reads all" each rank reads every
value by itself, as before version 1. A round begins when all ranks have ended the one before.
"""

import argparse
import itertools
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from fastckpt._core.client.collective import Agreement
from fastckpt._core.client.job_store import JobRanks
from tests.support.counting_store import CountingStore

PATIENCE = timedelta(minutes=10)
VALUE = {"candidates": [[1, step, "memory"] for step in range(5)]}
"""About as long as what a rank says at a resume."""
Run = Callable[[], object]


def decide(agreement: Agreement) -> Any:
    """One answer to all."""
    return agreement.decide(VALUE, len)


def gather(agreement: Agreement) -> Any:
    """The values of all, to all."""
    return agreement.gather(VALUE)


def each_reads_all(agreement: Agreement, rounds: list[int]) -> Any:
    """All to all."""
    ranks = agreement._ranks
    rounds.append(0)
    keys = [f"all/{len(rounds)}/{rank}" for rank in range(ranks.world)]
    mailbox = agreement._mailbox
    mailbox.put(keys[ranks.rank], VALUE)
    mailbox._store.wait(keys, PATIENCE)
    values = [mailbox._store.get(key) for key in keys]
    if len(rounds) > 1:
        mailbox.remove(f"all/{len(rounds) - 1}/{ranks.rank}", pieces=1)
    return values


def process(way: str, port: int, ranks: range, world: int, counts: bool, rounds: int, gate: Any, results: Any) -> None:
    """Ranks of one process, each in a thread."""
    threads_gate = threading.Barrier(len(ranks) + 1)
    requests = [0] * len(ranks)

    def rank(number: int) -> None:
        client = dist.TCPStore("127.0.0.1", port, timeout=PATIENCE)
        store = CountingStore(client) if counts else client
        agreement = Agreement("cost", ranks=JobRanks("benchmark", store, number, world))
        done: list[int] = []
        ways = {"decide": decide, "gather": gather, "each reads all": partial(each_reads_all, rounds=done)}
        for _ in range(rounds):
            threads_gate.wait()
            ways[way](agreement)
            threads_gate.wait()
        if isinstance(store, CountingStore):
            requests[number - ranks.start] = store.requests.total()

    threads = [threading.Thread(target=rank, args=(number,)) for number in ranks]
    for each in threads:
        each.start()
    for _ in range(rounds):
        gate.wait()
        threads_gate.wait()
        threads_gate.wait()
        gate.wait()
    for each in threads:
        each.join()
    results.put(sum(requests))


def measured(way: str, world: int, rounds: int, processes: int, *, counts: bool) -> tuple[float, float]:
    """The median of seconds, and the mean of requests, of one agreement."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    count = min(processes, world)
    bounds = [world * number // count for number in range(count + 1)]
    gate, results = context.Barrier(count + 1), context.SimpleQueue()
    parts = [range(*pair) for pair in itertools.pairwise(bounds)]
    children = [
        context.Process(target=process, args=(way, server.port, part, world, counts, rounds, gate, results))
        for part in parts
    ]
    for each in children:
        each.start()
    seconds = []
    for _ in range(rounds):
        gate.wait()
        begin = time.perf_counter()
        gate.wait()
        seconds.append(time.perf_counter() - begin)
    total = sum(results.get() for _ in children)
    for each in children:
        each.join()
    return statistics.median(seconds), total / rounds


def main() -> None:
    """Print a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 128, 512])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=16)
    options = parser.parse_args()
    print(f"{'ranks':>6} {'way':<15} {'s, median':>10} {'requests':>10} {'a rank':>8}")
    for world in options.ranks:
        for way in ("each reads all", "gather", "decide"):
            rounds = 2 if way == "each reads all" else options.rounds
            seconds, _ = measured(way, world, rounds, options.processes, counts=False)
            _, requests = measured(way, world, 2, options.processes, counts=True)  # counting takes time
            print(f"{world:>6} {way:<15} {seconds:>10.4f} {requests:>10.0f} {requests / world:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
