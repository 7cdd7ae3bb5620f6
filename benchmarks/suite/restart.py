"""A restart after SIGKILL of one of two workers, until the first step of the resumed job, stage by stage.

Its jobs are those of benchmarks/restart.py, which has more launchers; here they take turns with torchrun and the limit.
"""

import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Goal, Values
from benchmarks.harness.turn import Turn
from benchmarks.restart import STAGES, Job, Restart, launchers, limit, restarts

KILLS = 3
REST = 8.0
"""Seconds of training before the first kill: real failures come later than that."""
COLD = 400.0
"""Seconds that a compiler with empty caches may take."""
CACHES = "TORCHINDUCTOR_CACHE_DIR"
TINY, LARGE, COMPILED = "tiny", "1.5", "compiled"


def job_of(turn: Turn, key: str, size: str, *script: str, name: str = "job", **environment: str) -> Job:
    """A job under a launcher of benchmarks/restart.py."""
    known = launchers(Path(), Path())[key]
    known = replace(known, script=script, environment=known.environment | environment)
    return Job(known, size, turn.folder / name, turn.shm)


def kills(turn: Turn, key: str, size: str) -> list[Restart]:
    """The restarts of one job."""
    return checked(restarts(job_of(turn, key, size), 1 if turn.is_quick else KILLS, REST))


def checked(found: Sequence[Restart | None]) -> list[Restart]:
    """The restarts, none of which may have been lost."""
    came_back = [each for each in found if each is not None]
    if len(came_back) < len(found):
        raise RuntimeError(f"a job did not come back: {len(came_back)} of {len(found)} restarts")
    return came_back


def values_of(found: Sequence[Restart]) -> Values:
    """Seconds in all, without the first step, and of each stage."""
    beyond = [sum(each.stages[stage] for stage in STAGES if stage != "first step") for each in found]
    stages = {stage.replace(" ", "_"): [each.stages[stage] for each in found] for stage in STAGES}
    return {"kill_to_step": [each.seconds for each in found], "beyond_step": beyond, **stages}


def measure(key: str, size: str, turn: Turn) -> Values:
    """Restarts under a launcher."""
    return values_of(kills(turn, key, size))


def copies(turn: Turn) -> Values:
    """Both workers copy the state at once into fresh memory: nobody resumes without that."""
    return {"copy": limit(LARGE, KILLS)[0]}


def compiled(turn: Turn) -> Values:
    """Restarts of a job whose model is compiled, and a start of the same script with the same caches under torchrun.

    To fill the caches takes a minute: TORCHINDUCTOR_CACHE_DIR keeps them from run to run.
    """
    folder = os.environ.get(CACHES, str(turn.folder / "inductor"))
    caches = {CACHES: folder, "TMPDIR": folder}  # inductor keeps precompiled headers where temporary files are
    Path(folder).mkdir(parents=True, exist_ok=True)
    fresh = [started(job_of(turn, "plain", COMPILED, "--compile", name=f"fresh-{n}", **caches)) for n in range(3)][1:]
    found = checked(restarts(job_of(turn, "preload", COMPILED, "--compile", **caches), KILLS, REST))
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


BENCHMARK = Benchmark(
    name="restart",
    question="How long is it from the kill of one of two workers to the first step of the resumed job?",
    work="GPT-2 with AdamW under DDP, 10 MB (tiny) and 1.5 GB, saved every second step. SIGKILL comes at a random "
    f"instant, {KILLS} times for each row.",
    contenders=[
        Contender("fastckpt, tiny", partial(measure, "preload", TINY)),
        Contender("torchrun + torch.save, tiny", partial(measure, "torchrun", TINY), quick=False),
        Contender("fastckpt, 1.5 GB", partial(measure, "preload", LARGE), quick=False),
        Contender("torchrun + torch.save, 1.5 GB", partial(measure, "torchrun", LARGE), quick=False),
        Contender("a copy of the state", copies, quick=False),
        Contender("fastckpt, compiled", compiled, quick=False),
    ],
    figures=[
        Figure("tiny: kill to first step", "fastckpt, tiny.kill_to_step", goal=Goal("at most", 0.15)),
        Figure("tiny: torchrun + torch.save", "torchrun + torch.save, tiny.kill_to_step"),
        Figure("1.5 GB: kill to first step", "fastckpt, 1.5 GB.kill_to_step"),
        Figure("1.5 GB: torchrun + torch.save", "torchrun + torch.save, 1.5 GB.kill_to_step"),
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
