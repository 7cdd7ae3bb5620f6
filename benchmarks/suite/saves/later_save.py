"""A later save to memory, beside a copy of the same tensors into warm shared memory."""

from functools import partial

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Goal, Values
from benchmarks.harness.turn import Turn, record, values_of
from benchmarks.suite._limits import all_cores, copy, seconds, warm_memory
from benchmarks.suite._processes import agent, rest
from benchmarks.suite._states import gpt2_with_adamw, storages

SAVES = 6


def save_beside_copies(turn: Turn) -> None:
    """The worker: saves and copies by turns, since memory of another process may be slower or faster."""
    from fastckpt import DdpCheckpointer, StorageType

    state = gpt2_with_adamw(turn.gigabytes)
    sources = storages(state)
    with DdpCheckpointer(turn.folder / "checkpoints") as checkpointer, warm_memory(sources) as targets:
        copy(targets, sources)
        checkpointer.prepare(state)
        for step in range(3):
            checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY)  # each slot is used once
        rest(agent())  # else what it makes ready for later saves takes cores from either side
        for step in range(3, 3 + SAVES):
            save = seconds(partial(checkpointer.save_checkpoint, step, state, storage_type=StorageType.MEMORY))
            with all_cores():
                record(save=save, copy=seconds(partial(copy, targets, sources)))


def measure(turn: Turn) -> Values:
    """Saves and copies of one job."""
    records = turn.job(save_beside_copies)
    return {"save": values_of(records, "save"), "copy": values_of(records, "copy")}


BENCHMARK = Benchmark(
    name="later_save",
    question="What does a later save to memory cost, compared with a copy of its bytes?",
    work="GPT-2 with AdamW, one worker. Each save is followed by a copy of the same tensors into warm shared memory.",
    contenders=[Contender("fastckpt", measure)],
    figures=[
        Figure("a save", "fastckpt.save"),
        Figure("a copy into warm memory, the limit", "fastckpt.copy"),
        Figure("save : copy", "fastckpt.save", "fastckpt.copy", Goal("at most", 1.2)),
    ],
)
