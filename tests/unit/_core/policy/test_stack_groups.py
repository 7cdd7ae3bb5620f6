"""Groups of ranks by their stacks: a table, without processes."""

import random
from dataclasses import replace

from fastckpt._core.policy.hangs import Witness
from fastckpt._core.policy.stack_groups import (
    CaughtRank,
    Frame,
    grouped,
    place_of,
)
from tests.support.tables import for_each

TORCH = "/usr/lib/python3.11/site-packages/torch"
REDUCE = [
    Frame(f"{TORCH}/distributed/distributed_c10d.py", "2810", "all_reduce"),
    Frame("/job/train.py", "40", "train"),
    Frame("/job/train.py", "90", "<module>"),
]
TAKE = [Frame("/job/data.py", "88", "take"), Frame("/job/train.py", "36", "train")]


def caught(rank: int, frames: list[Frame], host: str = "", **witness) -> CaughtRank:
    """A rank that waits if its stack is in torch.distributed; eight ranks a host."""
    waits = bool(frames) and "/torch/" in frames[0].file
    witness = {"steps": 41, "waits": waits, **witness}
    names = tuple(frame.name for frame in frames)
    return CaughtRank(Witness(rank, **witness), host or f"h{rank // 8}", names, place_of(frames), waits)


def waiting(count: int, *others: CaughtRank) -> list[CaughtRank]:
    """So many ranks, all of which wait but these others."""
    elsewhere = {each.witness.rank for each in others}
    return [*(caught(rank, REDUCE) for rank in range(count) if rank not in elsewhere), *others]


def spinning(ranks: list[CaughtRank]) -> list[CaughtRank]:
    return [replace(each, witness=replace(each.witness, waits=False)) for each in ranks]


TAKES, UNKNOWN = "is in take (data.py:88)", "which of them is to blame is not known"
WAITS, WAIT = "waits in all_reduce (train.py:40)", "wait in all_reduce (train.py:40)"
TABLE = {
    "one of 64 is elsewhere": (
        waiting(64, caught(37, TAKE)),
        f"1 of 64 ranks, rank 37 on host h4, {TAKES}; 63 {WAIT}",
    ),
    "of two odd ones, the one with fewer steps": (
        waiting(16, caught(3, TAKE), caught(9, TAKE, steps=40)),
        f"1 of 16 ranks, rank 9 on host h1, {TAKES}; rank 3 on host h0 {TAKES}; 14 {WAIT}",
    ),
    "all in one place, but one is a step behind": (
        waiting(8, caught(5, REDUCE, steps=40)),
        f"1 of 8 ranks, rank 5 on host h0, {WAITS}; 7 {WAIT}; rank 5 has done fewer steps than the others",
    ),
    "one waits in another collective": (
        waiting(8, caught(5, [replace(REDUCE[0], function="barrier"), *TAKE[1:]])),
        f"1 of 8 ranks, rank 5 on host h0, waits in barrier (train.py:36); 7 {WAIT}; rank 5 waits elsewhere than most",
    ),
    "one is stopped, another elsewhere": (
        waiting(4, caught(1, TAKE), caught(2, [], state="T")),
        f"1 of 4 ranks, rank 2 on host h0, is stopped (SIGSTOP); rank 1 on host h0 {TAKES}; ranks 0,3 on host h0 wait",
    ),
    "one gives no stack": (
        waiting(10, caught(2, [])),
        f"1 of 10 ranks, rank 2 on host h0, gives no stack; 9 {WAIT}",
    ),
    "one has left": (
        waiting(8, caught(5, [], has_left=True)),
        f"1 of 8 ranks, rank 5 on host h0, has closed its checkpointer; 7 {WAIT}",
    ),
    "all spin, as over NCCL, and one is elsewhere": (
        spinning(waiting(8, caught(7, TAKE))),
        f"1 of 8 ranks, rank 7 on host h0, {TAKES}; 7 compute in all_reduce (train.py:40)",
    ),
}


@for_each(*TABLE.values())
def test_the_line_names_the_odd_ranks_first(ranks, line):
    random.Random(3).shuffle(ranks)
    assert grouped(ranks, len(ranks)).line.startswith(line)
