"""A restart after SIGKILL of one of two workers, until the first step of the resumed job, stage by stage."""

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Goal, Values
from benchmarks.harness.turn import Turn
from benchmarks.suite import _peers
from benchmarks.suite.restarts._restart_jobs import LAUNCHERS, STAGES, Job, Launcher, Restart, limit, restarts

KILLS = 3
REST = 8.0
"""Seconds of training before the first kill: real failures come later than that."""
COLD = 400.0
"""Seconds that a compiler with empty caches may take."""
CACHES = "TORCHINDUCTOR_CACHE_DIR"
TINY, LARGE, COMPILED = "tiny", "1.5", "compiled"


def kills(turn: Turn, name: str, size: str) -> list[Restart]:
    """The restarts of one job under a launcher."""
    job = Job(LAUNCHERS[name], size, turn.folder / "job", turn.shm)
    return restarts(job, 1 if turn.is_quick else KILLS, REST)


def values_of(found: Sequence[Restart]) -> Values:
    """Seconds in all, without the first step, and of each stage."""
    beyond = [sum(each.stages[stage] for stage in STAGES if stage != "first step") for each in found]
    stages = {stage.replace(" ", "_"): [each.stages[stage] for each in found] for stage in STAGES}
    afresh = [float(each.step == 0) for each in found]
    return {"kill_to_step": [each.seconds for each in found], "beyond_step": beyond, "afresh": afresh, **stages}


def measure(name: str, size: str, turn: Turn) -> Values:
    """Restarts under a launcher."""
    with _peers.cleared_up():
        return values_of(kills(turn, name, size))


def copies(turn: Turn) -> Values:
    """Both workers copy the state at once into fresh memory: nobody resumes without that."""
    return {"copy": limit(LARGE, KILLS)}


def compiled(turn: Turn) -> Values:
    """Restarts of a job whose model is compiled, and a start of the same script with the same caches under torchrun.

    To fill the caches takes a minute: TORCHINDUCTOR_CACHE_DIR keeps them from run to run.
    """
    folder = os.environ.get(CACHES, str(turn.folder / "inductor"))
    caches = {CACHES: folder, "TMPDIR": folder}  # inductor keeps precompiled headers where temporary files are
    Path(folder).mkdir(parents=True, exist_ok=True)

    def job(launcher: Launcher, name: str) -> Job:
        launcher = replace(launcher, environment=launcher.environment | caches)
        return Job(launcher, COMPILED, turn.folder / name, turn.shm, "--compile")

    plain = Launcher("torch.distributed.run", "torch")
    fresh = [started(job(plain, f"fresh-{number}")) for number in range(3)][1:]
    found = restarts(job(LAUNCHERS["fastckpt"], "job"), KILLS, REST)
    beyond = [each.seconds - statistics.median(fresh) for each in found]
    return values_of(found) | {"fresh_process": fresh, "beyond_fresh": beyond}


def started(job: Job) -> float:
    """Seconds from the first line of a script to the end of its first step, on the slower rank."""
    with job.started("--steps", "1") as process:
        process.wait(COLD)
    lines = {(line["rank"], line["what"]): line["at"] for line in job.lines()}
    return max(lines[rank, "step"] - lines[rank, "script"] for rank in (0, 1))


def stages(contender: str) -> list[Figure]:
    """A row for each stage, in milliseconds."""
    return [
        Figure(f"{contender}: {stage}", f"{contender}.{stage.replace(' ', '_')}", unit="ms", scale=1e3, is_detail=True)
        for stage in STAGES
        if stage != "failed attempts"
    ]


SIZES = {TINY: "tiny", LARGE: "1.5 GB"}
TITLES = {"torchrun": "torchrun + torch.save"}


def contender(name: str, size: str) -> Contender:
    """A launcher at a size, in the environment of a peer if it needs one."""
    peer = LAUNCHERS[name].peer
    missing: Callable[[], str] = partial(_peers.missing, peer) if peer else str
    quick = (name, size) == ("fastckpt", TINY)
    return Contender(f"{TITLES.get(name, name)}, {SIZES[size]}", partial(measure, name, size), missing, quick)


def others(size: str) -> list[Figure]:
    """A row for each launcher but ours and torchrun."""
    shown = [name for name in LAUNCHERS if name not in ("fastckpt", "torchrun")]
    return [Figure(f"{SIZES[size]}: {name}", f"{name}, {SIZES[size]}.kill_to_step") for name in shown]


BENCHMARK = Benchmark(
    name="restart",
    question="How long is it from the kill of one of two workers to the first step of the resumed job?",
    work="GPT-2 with AdamW under DDP, 10 MB (tiny) and 1.5 GB, saved every second step. SIGKILL comes at a random "
    f"instant, {KILLS} times for each row.",
    contenders=[
        *(contender(name, size) for size in SIZES for name in LAUNCHERS),
        Contender("a copy of the state", copies, quick=False),
        Contender("fastckpt, compiled", compiled, quick=False),
    ],
    figures=[
        Figure("tiny: kill to first step", "fastckpt, tiny.kill_to_step", goal=Goal("at most", 0.15)),
        Figure("tiny: torchrun + torch.save", "torchrun + torch.save, tiny.kill_to_step"),
        *others(TINY),
        Figure("1.5 GB: kill to first step", "fastckpt, 1.5 GB.kill_to_step"),
        Figure("1.5 GB: torchrun + torch.save", "torchrun + torch.save, 1.5 GB.kill_to_step"),
        *others(LARGE),
        Figure(
            "1.5 GB: a copy of the state by both workers at once, the limit", "a copy of the state.copy", is_detail=True
        ),
        Figure(
            "1.5 GB: kill to first step, without the step itself : copy",
            "fastckpt, 1.5 GB.beyond_step",
            "a copy of the state.copy",
            Goal("at most", 1.5),
        ),
        Figure("torch.compile, caches warm: kill to first step", "fastckpt, compiled.kill_to_step"),
        Figure(
            "torch.compile, caches warm: the first step of a fresh process",
            "fastckpt, compiled.fresh_process",
        ),
        Figure(
            "torch.compile: restart minus fresh process",
            "fastckpt, compiled.beyond_fresh",
            goal=Goal("at most", 1.0),
        ),
        *stages("fastckpt, tiny"),
        *stages("fastckpt, 1.5 GB"),
        *stages("fastckpt, compiled"),
    ],
    rounds=1,
)
