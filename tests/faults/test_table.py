"""Jobs to which the rows of the table happen, one after the other: each comes back as it says, bit for bit."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.faults import table
from tests.faults.jobs import Job, assert_all_injected, assert_as_if_nothing_had_happened
from tests.faults.table import DEEDS, FIRST, PROGRAMS, VARIANTS, Program, Row


def varied(program: Program, *way: str) -> Program:
    return replace(program, script=(*program.script, *way), plain=(*program.plain, *way) if program.plain else ())


VARIED = {f"{name} {way}": varied(PROGRAMS[name], *way.split()) for name, ways in table.WAYS.items() for way in ways}


def cases() -> list[Any]:
    """A choice that covers all pairs of values; for campaigns the whole table, and other ways of its programs."""
    found = [*table.jobs(table.covering(table.rows(PROGRAMS)))]
    chosen = len(found)
    found += table.jobs(table.rows([*PROGRAMS, *VARIANTS]))
    whole = [(name, [row for row in table.rows([name.split(" --")[0]]) if row.deed == "kill"]) for name in VARIED]
    names = [f"{name}-{number}" for number, (name, _) in enumerate(found)]
    marked = []
    for number, (name, mine) in enumerate([*found, *whole]):
        program = (PROGRAMS | VARIANTS | VARIED)[name]
        marks = [pytest.mark.campaign] * (number >= chosen)
        marks += [pytest.mark.frameworks] * program.is_framework
        marked.append(pytest.param(program, mine, id=[*names, *VARIED][number], marks=marks))
    return marked


@pytest.fixture
def run_of(new_job: Any, uninterrupted: Callable[..., Job]) -> Callable[..., Any]:
    """Runs a program under faults; the job, and the run that nothing befell."""

    def run(program: Program, *faults: Any, steps: int) -> tuple[Job, Job]:
        job, length = new_job().with_faults(*faults), program.steps(steps)
        file, *script = program.plain or (program.file, *program.script)
        saves = ("--memory", "2", "--disk", "4" if program.layout else "1000")  # which no fault of others needs
        reference = uninterrupted(*saves, *script, *length, program=file, **program.environment)
        scratch = job.folder / "scratch"
        scratch.mkdir()
        own = [str(scratch) if each == "scratch" else each for each in program.script]
        job.run_to_the_end(*saves, *own, *length, program=program.file, **program.environment)
        assert os.listdir(scratch) == []
        return job, reference

    return run


@pytest.mark.parametrize(("program", "mine"), cases())
def test_what_the_table_says_comes_back_after_each_fault(run_of, program: Program, mine: list[Row]) -> None:
    told = [*table.faults_of(mine, program.gap)]
    job, reference = run_of(program, *(fault for _, fault in told), steps=program.gap * (len(told) + 2) or 4)
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, reference, program.interval)
    assert_from_memory(job, sum(row is None or DEEDS[row.deed].goes_on != "nothing" for row, _ in told))
    refused = [row for row in mine if row.phase.startswith("persist.") and DEEDS[row.deed].goes_on == "nothing"]
    assert job.text().count("could not be persisted") >= len(refused), job.text()
    assert job.stored() and not job.arena().exists()
    shutil.rmtree(job.folder / "checkpoints")


def assert_from_memory(job: Job, ended: int) -> None:
    """Each start that came to its first step has the newest step from memory, or began when nothing had been saved."""
    starts = job.starts()[1:]
    assert len(starts) <= ended, job.text()
    for start in starts:
        found = {(line["tier"], line["loaded"] > 0) for line in (log[0] for log in start.values())}
        is_first = job.faults[0].at == FIRST and start is starts[0]
        assert found == {("memory", True)} or (is_first and found == {("", False)}), f"{found}\n{job.text()}"
