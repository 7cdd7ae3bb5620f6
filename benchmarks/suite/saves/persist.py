"""A persist from end to end, beside a bare write of the same memory; and its processor time, cores idle or busy."""

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import xxhash

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Goal, Values
from benchmarks.harness.turn import Turn, record, values_of
from benchmarks.suite._limits import BLOCK, bare_write
from benchmarks.suite._processes import agent, busy, processor_seconds, rest
from benchmarks.suite._states import gpt2_with_adamw

PERSISTS = 5
BUSY_PERSISTS = 4
WARM_UP = 4.0
"""Seconds until busy processes have started."""


def persist_by_turns(turn: Turn) -> None:
    """The worker: persists, bare writes and digests of the same image by turns, on idle cores and then on busy ones."""
    from fastckpt import DdpCheckpointer, StorageType

    state = gpt2_with_adamw(turn.gigabytes)
    saver = agent()
    with DdpCheckpointer(turn.folder / "checkpoints") as checkpointer:

        def persist(step: int) -> float:
            before = processor_seconds(saver)
            checkpointer.save_checkpoint(step, state, storage_type=StorageType.DISK)
            checkpointer.wait_latest_checkpoint()
            return processor_seconds(saver) - before

        for step in range(4):  # each slot is used once
            checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY)
            time.sleep(0.2)
        rest(saver)
        persist(4)
        image = next(turn.shm.glob("*/slot-*/model.pt"))
        _record_turns(image, turn.folder / "bare", persist, range(5, 5 + PERSISTS), "")
        with busy(os.cpu_count() or 1):
            time.sleep(WARM_UP)
            _record_turns(image, turn.folder / "bare", persist, range(20, 20 + BUSY_PERSISTS), "busy_")


def _record_turns(image: Path, bare: Path, persist: Callable[[int], float], steps: range, prefix: str) -> None:
    gigabytes = image.stat().st_size / 1e9
    for step in steps:
        used = {f"{prefix}persist_processor": persist(step) / gigabytes}
        seconds, processor = _used(lambda: [bare_write(image, bare)])
        used[f"{prefix}bare_processor"] = processor / gigabytes
        digest, processor = _used(lambda: [_digest(image)])
        used[f"{prefix}digest_processor"] = processor / gigabytes
        record(**used, **{f"{prefix}bare": seconds[0], f"{prefix}digest": digest[0]})


def _used(work: Callable[[], list[float]]) -> tuple[list[float], float]:
    before = processor_seconds(process := psutil.Process())
    return work(), processor_seconds(process) - before


def _digest(image: Path) -> float:
    with image.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        digest, start = xxhash.xxh3_128(), time.perf_counter()
        for offset in range(0, len(memory), BLOCK):
            with memoryview(memory)[offset : offset + BLOCK] as block:
                digest.update(block)
        return time.perf_counter() - start


def measure(turn: Turn) -> Values:
    """Persists, bare writes and digests of one job; the first persist warms up."""
    records = turn.job(persist_by_turns)
    found = {key for each in records if "bare" in each or "busy_bare" in each for key in each}
    values = {key: values_of(records, key) for key in found}
    persists = [each["seconds"] for each in records if each.get("event") == "persisted"][1:]
    return values | {"persist": persists[:PERSISTS], "busy_persist": persists[PERSISTS : PERSISTS + BUSY_PERSISTS]}


BENCHMARK = Benchmark(
    name="persist",
    question="What does a persist cost, compared with a bare write of the same bytes?",
    work="GPT-2 with AdamW, one worker. Persists alternate with O_DIRECT writes and fdatasync of the same image, first "
    "on idle cores, then with a busy process for each core. Processor time is that of the agent.",
    contenders=[Contender("fastckpt", measure)],
    figures=[
        Figure("a persist, from the commit to durable", "fastckpt.persist", is_detail=True),
        Figure("a bare write, the limit", "fastckpt.bare", is_detail=True),
        Figure("persist : bare write", "fastckpt.persist", "fastckpt.bare", Goal("at most", 1.15)),
        Figure("persist : bare write, all cores busy", "fastckpt.busy_persist", "fastckpt.busy_bare"),
        Figure("processor time of a persist, cores idle", "fastckpt.persist_processor", unit="s/GB", is_detail=True),
        Figure(
            "processor time of a persist, all cores busy",
            "fastckpt.busy_persist_processor",
            goal=Goal("at most", 0.1),
            unit="s/GB",
        ),
        Figure(
            "processor time of the digest alone, all cores busy",
            "fastckpt.busy_digest_processor",
            unit="s/GB",
            is_detail=True,
        ),
        Figure(
            "processor time of the bare write alone, all cores busy",
            "fastckpt.busy_bare_processor",
            unit="s/GB",
            is_detail=True,
        ),
    ],
    rounds=1,
)
