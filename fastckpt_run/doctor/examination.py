"""An examination: checks one after the other in a process with a deadline, which is given up when one hangs."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from fastckpt._core.policy.node_check import CheckResult
from fastckpt._core.storage.store import is_url
from fastckpt_run.doctor import catalogue
from fastckpt_run.doctor.catalogue import Check, name_of
from fastckpt_run.doctor.diagnosis import Diagnosis, Subject, problem
from fastckpt_run.node_check.check_process import CheckProcess

HANGS = "ask who runs that file system, or look at its server: nothing that a job saves there can become durable"


def examine(subject: Subject, deadline: float) -> list[Diagnosis]:
    """All that `fastckpt doctor` looks at; a check that takes longer than ``deadline`` seconds is given up."""
    with CheckProcess(deadline) as process:
        return [
            *run(process, catalogue.HOST, subject),
            *run(process, catalogue.SHARED_MEMORY, subject),
            *of_directory(process, subject),
            *run(process, catalogue.NETWORK, subject),
        ]


def of_directory(process: CheckProcess, subject: Subject, *, storage: bool = True) -> list[Diagnosis]:
    """Return the findings on a checkpoint directory, or without one those on memory.

    For a directory that does not answer, that is the only finding.
    """
    if not subject.directory:
        return list(run(process, catalogue.ARENAS, subject))
    of_storage = (catalogue.URL if is_url(subject.directory) else catalogue.PATH) if storage else ()
    checks = (*of_storage, *catalogue.ARENAS, *catalogue.CLAIMS, *catalogue.RESUME)
    return list(run(process, checks, subject, is_one_place=True))


def run(
    process: CheckProcess, checks: Iterable[Check], subject: Subject, *, is_one_place: bool = False
) -> Iterator[Diagnosis]:
    """Run checks; if they look at ``is_one_place``, none is begun after one that hangs there."""
    left = [name_of(check) for check in checks]
    while left:
        name = left.pop(0)
        lines = process.lines(name, **asdict(subject))
        if not isinstance(lines, CheckResult):
            yield from map(Diagnosis.from_record, lines)
            continue
        rest = f"; not looked at: {', '.join(left)}" if is_one_place and left else ""
        where = f"{subject.directory}: " if is_one_place else ""
        yield problem(name, f"{where}{lines.message}{rest}", HANGS if is_one_place else "look at what it reads")
        if is_one_place:
            return
