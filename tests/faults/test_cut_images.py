"""Images in shared memory that somebody cuts while the job has them mapped: who touches them dies, no step is lost."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.faults import cut, kill
from tests.faults.jobs import Job, assert_as_if_nothing_had_happened
from tests.faults.test_phases import PERSIST, RESUME, SNAPSHOT

SAVED = 10
"""Steps from one checkpoint on storage to the next."""


def run_whoever_dies(job: Job, *script: str) -> list[int]:
    """Launch a job again as often as its agent dies of SIGBUS, to its good end; the codes with which it ended."""
    codes = [job.start(*script, restarts=5).wait()]
    while codes[-1] == -signal.SIGBUS and len(codes) < 5:
        codes.append(job.start(*script, restarts=5).wait())
    assert codes[-1] == 0, f"{codes}\n{job.text()}"
    return codes


@pytest.mark.parametrize(
    ("phase", "part"),
    [
        ("snapshot.fill", 0.0),
        *(
            pytest.param(phase, part, marks=pytest.mark.campaign)
            for phase in (*SNAPSHOT, *PERSIST, *RESUME)
            for part in (0.0, 0.5)
        ),
    ],
)
def test_images_that_are_cut_in_a_phase_cost_a_restart_from_what_is_durable(
    new_job: Any, uninterrupted: Callable[..., Job], phase: str, part: float
) -> None:
    faults = [kill(rank=1, at="train.step", step=25), cut(part, at=phase)]
    job = new_job().with_faults(*(faults if phase in RESUME else [cut(part, at=phase, step=24)]))
    codes = run_whoever_dies(job, "--wait", "--named")
    print(phase, part, codes, job.resumes(), sorted(job.skips()))
    assert_as_if_nothing_had_happened(job, uninterrupted(), SAVED)
    assert job.stored()[0] == 60
    assert job.injected() == len(job.faults)


@pytest.mark.campaign
def test_images_that_are_cut_at_any_instant_cost_a_restart_from_what_is_durable(
    new_job: Any, uninterrupted: Callable[..., Job]
) -> None:
    """Also while the agent digests one through a mapping: then it dies with its workers, and is launched again."""
    script, chance, codes, cuts = ("--ballast", "96", "--disk", "4", "--wait"), random.Random(3), [], 0
    reference, job = uninterrupted(), new_job()
    while not codes or codes[-1] == -signal.SIGBUS:
        process = job.start(*script, restarts=40).process
        while process.poll() is None:
            time.sleep(chance.uniform(0.05, 0.6))
            if cuts < 40 and job.stored():
                cuts += cut_all()
        codes.append(job.wait())
    print(codes, cuts, job.resumes())
    assert codes[-1] == 0, job.text()
    assert job.ends() == reference.ends() and job.losses(0) == reference.losses(0)
    assert job.stored()[0] == 60


def cut_all() -> bool:
    """Cut what is there of the large file, by half; whether there was any."""
    found = [*Path(os.environ["FASTCKPT_SHM_DIR"]).glob("*/slot-*/model.pt")]
    for path in found:
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path, path.stat().st_size // 2)
    return bool(found)
