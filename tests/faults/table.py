"""The table of faults: program x fault x phase x rank -> what comes back. A checkpointer, a fault or a phase is a row.

Whatever comes back, losses and weights are those of the run that nothing befell, and nothing is left behind.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from tests.faults import faults
from tests.faults.conftest import FRAMEWORKS
from tests.faults.faults import Fault

# --- phases

SNAPSHOT = ("snapshot.skeleton", "snapshot.fill", "snapshot.commit", "snapshot.notify")
SHARDS = ("snapshot.shards", *SNAPSHOT)
ENGINE = ("snapshot.engine", *SNAPSHOT)
OVERLAP = ("overlap.copy", "overlap.compare", "overlap.commit", "overlap.notify", "overlap.wait")
OFFLOAD = ("offload.forward", "offload.wait_for_writes", "offload.write", "offload.plan", "offload.read")
PERSIST = (
    "persist.write",
    "persist.manifest",
    "persist.retire",
    "persist.rename",
    "persist.link",
    "persist.tracker",
    "persist.drop",
)
RESUME = ("resume.verify", "resume.load")
LAUNCH = ("launch.rendezvous", "arena.adopt")
FIRST = "arena.reserve"
STEP = "train.step"


def begins_a_start(phase: str) -> bool:
    """Whether the phase is one of a start: something has to end the one before."""
    return phase in (*RESUME, *LAUNCH)


# --- programs


@dataclass(frozen=True)
class Program:
    """A training with one checkpointer.

    Attributes:
        file: Its path, from this folder.
        saving: Phases of its workers beside those of a resume, in which ranks can be hit.
        ranks: Ranks that enter these.
        layout: Of its files; empty, if another has the same: what the agent does is then covered by that one.
        plain: File and arguments of the run that nothing befalls, if these are others.
        interval: Steps that are repeated at most.
        gap: Steps from one fault to the next: two saves to storage, four to memory; 0, where steps take long.
        steps: The arguments for so many steps, or more.
    """

    file: str
    script: tuple[str, ...] = ()
    saving: tuple[str, ...] = (*SNAPSHOT, STEP)
    ranks: tuple[int, ...] = (0, 1)
    layout: str = ""
    plain: tuple[str, ...] = ()
    interval: int = 2
    gap: int = 8
    steps: Callable[[int], tuple[str, ...]] = lambda steps: ("--steps", str(steps))
    environment: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def is_framework(self) -> bool:
        return bool(self.environment)


def framework(file: str, *script: str, **more: Any) -> Program:
    return Program(file, script, environment=FRAMEWORKS, **more)


def epochs(steps: int) -> tuple[str, ...]:
    """Of 12 steps each."""
    return "--epochs", str(-(-steps // 12))


DEEPSPEED, OFFLOADING = "../e2e/deepspeed/train.py", "../e2e/offload/train.py"
TRAINER, STOCK = "../e2e/huggingface/train.py", "../e2e/huggingface/stock.py"
ACCELERATE, LIGHTNING = "programs/with_accelerate.py", "programs/with_lightning.py"
FSDP = "programs/fsdp.py"
OVERLAPPED = {"saving": OVERLAP, "interval": 4}
PROGRAMS = {
    "ddp": Program("train.py", ("--named", "--wait"), layout="torch"),
    "ddp, overlapped": Program("train.py", ("--overlap",), ranks=(0,), plain=("train.py",), **OVERLAPPED),
    "lines": Program(
        "programs/lines.py", ("--every", "2", "1000"), (*OVERLAP[:3], STEP), (0,), interval=4, steps=epochs
    ),
    "fsdp2": Program(FSDP, ("--wait",), (*SHARDS, STEP), layout="distcp"),
    "dcp": Program("programs/dcp.py"),
    "offload": Program(
        OFFLOADING, ("--memory", "1", "--offload", "scratch"), OFFLOAD, gap=0, plain=(OFFLOADING, "--memory", "1")
    ),
    "deepspeed": framework(DEEPSPEED, saving=ENGINE),
    "trainer": framework(TRAINER, saving=SNAPSHOT, plain=(STOCK, "--resume", "none")),
    "accelerate": framework(ACCELERATE),
    "lightning": framework(LIGHTNING, interval=3),
}

KINDS = [(stage, dtype) for stage in range(4) for dtype in ("fp32", "bf16")] + [(1, "bf16-fp32")]
WAYS = {
    "trainer": [
        *("--way fsdp2", "--way fsdp2-full", "--way lora", "--overlap", "--kind own", "--accumulate 2"),
        *(f"--way deepspeed --stage {stage}" for stage in (1, 2, 3)),
    ],
    "accelerate": ["--way stateful", "--way hooks", "--way bin", "--way named"],
    "lightning": ["--way unseeded"],
    "fsdp2": ["--way fsdp1", "--way tp"],
    "deepspeed": [f"--stage {stage} --dtype {dtype}" for stage, dtype in KINDS],
}
"""Other ways of these programs, for campaigns."""
VARIANTS = {
    "fsdp2, overlapped": Program(FSDP, ("--overlap",), **OVERLAPPED),
    "fsdp2, full": Program(FSDP, ("--way", "full")),
    "fsdp1, full": Program(FSDP, ("--way", "full1")),
    "deepspeed, overlapped": framework(DEEPSPEED, "--overlap", **OVERLAPPED),
    "accelerate, overlapped": framework(ACCELERATE, "--overlap", ranks=(0,), **OVERLAPPED),
    "lightning, overlapped": framework(LIGHTNING, "--overlap", ranks=(0,), **OVERLAPPED),
}


# --- faults


@dataclass(frozen=True)
class Deed:
    """What befalls a job.

    Attributes:
        make: The fault, of the rank, the phase and a step.
        goes_on: What brings the job back: a "restart" of its workers, another "launch", or "nothing" has to.
        phases: Those in which it can happen; all, if there are none.
    """

    make: Callable[[int, str, int], Fault]
    goes_on: str
    phases: tuple[str, ...] = ()


CALLS = {"persist.write": "pwrite", "persist.manifest": "fsync", "persist.rename": "rename"}
IN_PYTHON = (*SHARDS[:-1], "snapshot.engine", STEP)
"""Phases in which what a rank raises is the rank's own: no thread's, and no verdict on a checkpoint."""
NO_THREADS = (*IN_PYTHON, "snapshot.notify", *RESUME)


def fails(error: str) -> Deed:
    return Deed(
        lambda rank, at, step: faults.refuse(rank, at, step, call=CALLS[at], error=error), "nothing", tuple(CALLS)
    )


DEEDS = {
    "kill": Deed(faults.kill, "restart"),
    "kill both": Deed(faults.kill_both, "restart"),
    "kill agent": Deed(faults.kill_agent, "launch"),
    # the workers of an agent that is killed die with it, as these do
    "kill all": Deed(faults.kill_all, "launch", ("snapshot.fill", "persist.link", *RESUME)),
    "stop and continue": Deed(lambda rank, at, step: faults.stop(rank, at, step, seconds=0.2), "nothing", NO_THREADS),
    "exception": Deed(faults.fail, "restart", IN_PYTHON),
    "sys.exit": Deed(faults.leave, "restart", IN_PYTHON),
    "I/O error": fails("EIO"),
    "full disk": fails("ENOSPC"),
    "quota": fails("EDQUOT"),
}

# --- rows


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    program: str
    deed: str
    phase: str
    rank: int

    def __str__(self) -> str:
        return f"{self.program}: {self.deed} of rank {self.rank} at {self.phase}"


def exists(row: Row) -> bool:
    """Whether such a thing can happen."""
    program, deed = PROGRAMS.get(row.program) or VARIANTS[row.program], DEEDS[row.deed]
    by_agent = row.phase.startswith(("persist.", "arena.", "launch."))
    if deed.phases and row.phase not in deed.phases:
        return False
    if row.phase == FIRST and row.rank:
        return False  # it is entered for both ranks at once
    if by_agent:
        at_launch = row.phase not in LAUNCH or deed.goes_on == "launch"  # there are no workers yet
        is_named = row.phase != "persist.link" or "--named" in program.script
        return bool(program.layout) and at_launch and is_named
    if row.phase in (*OFFLOAD, "snapshot.engine") and row.deed not in ("kill", "kill both", "exception"):
        return False  # they are a part of a step or a save: the agent has none in them
    return row.phase in RESUME or (row.phase in program.saving and row.rank in program.ranks)


def rows(programs: Iterable[str]) -> list[Row]:
    """The whole table of these programs."""
    phases = dict.fromkeys((FIRST, *SHARDS, *ENGINE, *OVERLAP, *OFFLOAD, *PERSIST, *RESUME, *LAUNCH, STEP))
    return [row for row in (Row(*values) for values in product(programs, DEEDS, phases, (0, 1))) if exists(row)]


def shows(row: Row) -> set[tuple[Any, ...]]:
    """Pairs that a run is to have once: what brings a job back, in each phase and program; deeds and ranks by stage."""
    way, stage = DEEDS[row.deed].goes_on, row.phase.split(".")[0]
    found = {
        (row.program, stage),
        (row.deed, stage),
        (row.rank, stage),
        (row.program, way.replace("nothing", "restart")),
    }
    return found | ({(way, row.phase)} if way != "nothing" else set())


def covering(table: Sequence[Row]) -> Iterator[Row]:
    """Few of the rows, which show all that any does: always the first of those that show most."""
    pairs = {row: shows(row) for row in table}
    left = set().union(*pairs.values())
    while left:
        best = max(table, key=lambda row: len(left & pairs[row]))
        left -= pairs[best]
        yield best


# --- jobs


def jobs(table: Iterable[Row], most: int = 12) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each program in jobs of some."""
    by_program: dict[str, list[Row]] = {}
    for row in table:
        by_program.setdefault(row.program, []).append(row)
    for program, mine in by_program.items():
        first, others = [row for row in mine if row.phase == FIRST], [row for row in mine if row.phase != FIRST]
        count = max(-(-len(others) // most), len(first))
        for number in range(count):
            yield program, in_turn([*first[number : number + 1], *others[number::count]])


def in_turn(mine: list[Row]) -> list[Row]:
    """An order in which each can happen, if something ends the start before those that happen in one."""
    first = [row for row in mine if row.phase == FIRST]
    ending = [row for row in mine if row.phase != FIRST and not begins_a_start(row.phase)]
    starting = [row for row in mine if begins_a_start(row.phase)]
    ending.sort(key=lambda row: DEEDS[row.deed].goes_on != "launch")
    starting.sort(key=lambda row: DEEDS[row.deed].goes_on != "launch")
    found = [*first]
    while ending or starting:
        found += [ending.pop(0)] if ending else []
        found += [starting.pop(0)] if starting else []
    return found


def faults_of(mine: Sequence[Row], gap: int) -> Iterator[tuple[Row | None, Fault]]:
    """The faults of a job, each with its row; before a start in which one happens, a kill, if nothing else ends it."""
    step, ended = gap or 2, ""
    if not gap:  # phases of a step that has no number: something has been saved before
        yield None, faults.kill(0, "snapshot.fill", step)
    for row in mine:
        is_start = begins_a_start(row.phase)
        needed = "launch" if row.phase in LAUNCH else "restart"
        if is_start and ended not in (needed, "launch"):
            end = faults.kill_agent(0, STEP, step) if needed == "launch" else faults.kill(0, "snapshot.fill", step)
            yield None, end
            step += gap
        yield row, DEEDS[row.deed].make(row.rank, row.phase, 0 if is_start or row.phase == FIRST else step)
        ended = DEEDS[row.deed].goes_on
        step += 0 if is_start else gap
