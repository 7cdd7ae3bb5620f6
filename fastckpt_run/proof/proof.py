"""The proof that a script resumes bit for bit: a run without kills, one with, and one more without if they differ."""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastckpt._core.inspect.inventory import take
from fastckpt._core.policy.planned_kills import CourseOfRun, PlannedKill, plan_kills
from fastckpt._core.report.events import find, read
from fastckpt._core.report.kill_notes import made
from fastckpt.errors import ConfigError
from fastckpt_run.formatting import count
from fastckpt_run.proof.likely_causes import (
    LikelyCause,
    causes_of_variation,
    likely_causes,
    not_resumed,
    varies_by_itself,
)
from fastckpt_run.proof.run_comparison import RunComparison, compare_runs
from fastckpt_run.proof.script_run import ScriptRun, ScriptRunner

PLAIN, KILLED, AGAIN = "uninterrupted", "killed", "again"
_VARIES = (
    "so that this tells nothing of a resume: seed all generators that the script uses, call "
    "torch.use_deterministic_algorithms(True), set PYTHONHASHSEED, and leave out what depends on time or on files that "
    "the script writes"
)


@dataclass
class Proof:
    """Result of a proof.

    Attributes:
        plain: The run without kills.
        killed: The run with kills.
        kills: Plan and note of each kill; no note (None) for one that did not come.
        found: The comparison of both.
        again: The comparison of two runs without kills, if that was made.
        causes: Causes of the differences, the likeliest first; [] if they do not.
        notes: Notes for the user.
    """

    plain: ScriptRun
    killed: ScriptRun
    kills: list[tuple[PlannedKill, dict[str, Any] | None]]
    found: RunComparison
    again: RunComparison | None = None
    causes: list[LikelyCause] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        """True if the run with kills ended well, and equals the other one."""
        return self.killed.code == 0 and self.found.equal and not self.causes


@dataclass(frozen=True)
class ProofPlan:
    """Plan of the runs of a script.

    Attributes:
        kills: Kills of workers in one run.
        seed: Chooses steps, ranks and phases.
        twice: Whether it is run twice without kills: always, never, or, if None, where a difference is found.
    """

    kills: int = 3
    seed: int = 0
    twice: bool | None = None


def prove(
    runner: ScriptRunner, plan: ProofPlan, shm_dir: str, tree: ast.Module | None, tell: Callable[[str], None]
) -> Proof:
    """Run a script with and without kills, and compare.

    Args:
        runner: Runs it.
        plan: Plan of the runs.
        shm_dir: A tmpfs in which arenas of these runs would be.
        tree: The script's source, if it can be read.
        tell: Called with a line for people.

    Raises:
        ConfigError: It cannot be tried.
    """
    tell("1. running it without kills")
    plain = runner.run(PLAIN)
    _check_plain(plain, tell)
    course = _course(plain, shm_dir)
    kills = plan_kills(course, plan.kills, plan.seed)
    if not kills:
        raise ConfigError(
            f"the script takes steps {course.saved[0]} to {course.last} with saves: no step is left between the first "
            "save and the end to kill at; give it more steps, or save earlier"
        )
    tell(f"   {plain.seconds:.0f} s, {course.last} steps, {len(course.saved)} saves")
    tell(f"2. running it with {count(len(kills), 'kill')}")
    killed = runner.run(KILLED, kills)
    found = compare_runs(plain.history, killed.history, (plain.checkpoints, killed.checkpoints), shm_dir)
    proof = Proof(plain, killed, [(kill, made(killed.record, kill)) for kill in kills], found)
    _check_killed(proof)
    if plan.twice or (plan.twice is None and _may_vary(proof)):
        tell("3. running it again without kills, to see whether it gives the same each time")
        again = runner.run(AGAIN)
        _check_plain(again, tell)
        proof.again = compare_runs(plain.history, again.history, (plain.checkpoints, again.checkpoints), shm_dir)
    proof.causes, proof.notes = _causes(proof, tree), list(_notes(proof, plan))
    return proof


def _may_vary(proof: Proof) -> bool:
    """Return whether a difference may be one of any two runs of the script, as far as these two show."""
    found, history = proof.found, proof.killed.history
    is_known = not_resumed(history) is not None or varies_by_itself(found, history)
    return not found.equal and proof.killed.code == 0 and not is_known


def _causes(proof: Proof, tree: ast.Module | None) -> list[LikelyCause]:
    found, history = proof.found, proof.killed.history
    if proof.again is not None and not proof.again.equal:
        return causes_of_variation(f"two runs without kills differ as well, {_VARIES}", tree)
    if varies_by_itself(found, history):
        return causes_of_variation(f"the first difference comes before any kill, {_VARIES}", tree)
    if found.equal and not_resumed(history) is None:
        return []
    return likely_causes(found, history, tree)


def _check_plain(run: ScriptRun, tell: Callable[[str], None]) -> None:
    """Raise ConfigError if a run without kills shows that the script cannot be tried."""
    history = run.history
    if history.outside:
        raise ConfigError(
            f"the script was not tried: it saves to {history.outside}, not to the directory that it was given "
            f"({run.checkpoints}): see how it sets its checkpoint directory, and name that with --dir-argument or "
            "--dir-variable"
        )
    if run.code:
        for line in run.output:
            tell(f"| {line}")
        raise ConfigError(f"the script fails without any kill: fastckpt-run ended with exit code {run.code}")
    if not history.starts:
        raise ConfigError("no worker made a checkpointer of fastckpt: there is nothing to resume")
    if not history.saved:
        raise ConfigError("the script saves nothing: every kill would lose all of it")


def _check_killed(proof: Proof) -> None:
    """Raise ConfigError if nothing was tried, or nothing can be compared."""
    if not any(note is not None for _, note in proof.kills):
        raise ConfigError("the script ended before the first kill; give it more steps, or another --seed")
    if not proof.found.steps and not proof.found.values and proof.killed.code == 0:
        raise ConfigError(
            "there is nothing to compare: no step was durable in both runs, and the script logs no values. Have it log "
            "its loss with fastckpt.metrics.log, or save to storage more often"
        )


def _notes(proof: Proof, plan: ProofPlan) -> Iterator[str]:
    """Yield the things that were not tried, or not compared."""
    found = proof.found
    if len(proof.kills) < plan.kills:
        yield f"there are steps for {len(proof.kills)} kills, not for {plan.kills}"
    for kill, note in proof.kills:
        if note is None:
            yield f"kill {kill.number} ({kill.kind}, rank {kill.rank}, from step {kill.step} on) did not come in time"
    if not proof.plain.history.logs:
        yield (
            "the script logs no values: checkpoints alone were compared. fastckpt.metrics.log(step, {'loss': loss}) "
            "has each step compared"
        )
    if found.unseeded:
        names = ", ".join("torch" if name == "cpu" else name for name in sorted(found.unseeded))
        yield (
            f"the global random generator of {names} is not seeded, and differs from run to run before any kill: its "
            "state is not compared"
        )
    if not found.steps:
        yield "no step was durable in both runs: checkpoints were not compared"
    elif found.last[0] != found.last[1]:
        yield (
            f"the newest durable step is {found.last[0]} without kills, and {found.last[1]} with them (saves may be "
            f"skipped while storage is slow): the newest that was compared is {found.steps[-1]}"
        )


def _course(run: ScriptRun, shm_dir: str) -> CourseOfRun:
    history = run.history
    return CourseOfRun(history.saved, _durable_steps(run, shm_dir), history.last, len(history.starts))


def _durable_steps(run: ScriptRun, shm_dir: str) -> Sequence[int]:
    """Steps that were persisted: by the event logs, or as far as retention has left them."""
    found = set[int]()
    for directory in run.history.directories:
        try:
            events = [event for path in find(directory) for event in read(path).events]
        except ConfigError:  # the user has turned logs off
            events = []
        found |= {event["step"] for event in events if event["event"] == "persisted" and type(event["step"]) is int}
        found |= {item.step for item in take(directory, shm_dir).whole if item.step is not None}
    return sorted(found)
