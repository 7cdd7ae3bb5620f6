"""A resume from memory, beside a copy of the same tensors into memory that was never touched."""

import mmap
import os
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Goal, Values
from benchmarks.harness.turn import Turn, record, values_of
from benchmarks.suite._limits import fresh_copy, seconds
from benchmarks.suite._states import gpt2_with_adamw, storages

PAIRS = 3
SETTLED = 4.0
"""Seconds after which the flush of the checkpoint is over, which a restart begins: it would take a core from both."""
POLICY = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "OMP_WAIT_POLICY": "passive"}
"""Policy of allocation and waiting.

Freed memory goes back to the kernel: else the second copy in a process gets memory that the first has touched. Torch's
threads sleep while they wait: else the limit takes three times its processor time where cores are busy.
"""
PHASES = {"resume.verify": "digests", "resume.load": "load"}


def resume_beside_copies(turn: Turn) -> None:
    """The worker: saves and dies; its successor resumes and copies by turns, in one process, and keeps neither."""
    from fastckpt import DdpCheckpointer, StorageType
    from fastckpt._core import metrics

    checkpointer = DdpCheckpointer(turn.folder / "checkpoints")
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        checkpointer.save_checkpoint(0, gpt2_with_adamw(turn.gigabytes), storage_type=StorageType.MEMORY)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(SETTLED)
    (image,) = Path(os.environ["FASTCKPT_SHM_DIR"]).glob("*/slot-0/model.pt")
    mapped = storages(torch.load(image, mmap=True))
    works = {"resume": checkpointer.load_checkpoint, "copy": partial(fresh_copy, mapped)}
    for memory, pairs in (("reused", PAIRS), ("any", PAIRS)):
        for number in range(1 if turn.is_quick else pairs):
            for kind in sorted(works, reverse=bool(number % 2)):
                touched = free_of_touched_pages(2 * image.stat().st_size) if memory == "reused" else 0.0
                record(**{f"{memory}_{kind}_{name}": value for name, value in measured(works[kind]).items()})
                if touched:
                    record(touch=touched)
                    record(**{PHASES[name]: metrics.seconds[name] for name in PHASES if kind == "resume"})
    checkpointer.close()


def free_of_touched_pages(size: int) -> float:
    """Have the kernel's next pages be ones that were touched a moment ago; returns seconds for each GB touched.

    Pages of a virtual machine that were free for long may have gone back to its host: the first touch then costs
    three to ten times as much, whoever makes it.
    """
    begin = time.perf_counter()
    mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()
    return (time.perf_counter() - begin) / size * 1e9


def measured(work: Callable[[], object]) -> dict[str, float]:
    """Seconds and processor seconds of some work, and how much of its memory came in large pages."""
    held: list[object] = []
    before, large = resource.getrusage(resource.RUSAGE_SELF), large_pages()
    taken = seconds(lambda: held.append(work()))
    after = resource.getrusage(resource.RUSAGE_SELF)
    processor = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"seconds": taken, "processor": processor, "large": large_pages() - large}


def large_pages() -> float:
    """GB of this process's own memory that are in large pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")) * 1024 / 1e9


def measure(turn: Turn) -> Values:
    """Resumes and copies of one job."""
    records = turn.job(resume_beside_copies, options=["--max-restarts=1", "--fast-max-stalls=0"], environment=POLICY)
    names = {name for each in records for name in each if name.startswith(("reused_", "any_"))}
    return {name: values_of(records, name) for name in sorted(names | {"touch", *PHASES.values()})}


BENCHMARK = Benchmark(
    name="resume",
    question="What does a resume from memory cost, compared with a copy of the same tensors into fresh memory?",
    work="GPT-2 with AdamW, one worker. Resumes and copies alternate in the process that follows a killed one. Their "
    "pages were touched and freed a moment before, or are any that the kernel gives.",
    contenders=[Contender("fastckpt", measure)],
    figures=[
        Figure("a resume", "fastckpt.reused_resume_seconds"),
        Figure("a copy into fresh memory, the limit", "fastckpt.reused_copy_seconds"),
        Figure(
            "resume : copy",
            "fastckpt.reused_resume_seconds",
            "fastckpt.reused_copy_seconds",
            Goal("at most", 1.2, of_ten=9),
        ),
        Figure(
            "the same in processor time",
            "fastckpt.reused_resume_processor",
            "fastckpt.reused_copy_processor",
            is_detail=True,
        ),
        Figure("of a resume: digests", "fastckpt.digests", is_detail=True),
        Figure("of a resume: unpickle and copy", "fastckpt.load", is_detail=True),
        Figure("a resume into any memory", "fastckpt.any_resume_seconds", is_detail=True),
        Figure("a copy into any memory", "fastckpt.any_copy_seconds", is_detail=True),
        Figure("resume : copy, any memory", "fastckpt.any_resume_seconds", "fastckpt.any_copy_seconds"),
    ],
)
