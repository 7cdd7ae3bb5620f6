"""Two signals to the agent, one after the other, in each phase: nothing durable is lost, and the code is right."""

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.faults import Fault, delay, kill
from tests.faults.jobs import Job, assert_as_if_nothing_had_happened

SLOW = 1.5
"""Seconds that a phase lasts, for signals to meet it."""
TERM_TWICE = (signal.SIGTERM, signal.SIGTERM)
INT_THEN_TERM = (signal.SIGINT, signal.SIGTERM)
AMID: dict[str, tuple[Fault, ...]] = {
    "rendezvous": (delay(SLOW, at="launch.rendezvous"),),
    "skeleton": (delay(SLOW, at="snapshot.skeleton", step=20),),
    "commit": (delay(SLOW, at="snapshot.commit", step=20),),
    "write": (delay(SLOW, at="persist.write", step=20),),
    "rename": (delay(SLOW, at="persist.rename", step=20),),
    "tracker": (delay(SLOW, at="persist.tracker", step=20),),
    "breakpoint flush": (kill(rank=1, at="train.step", step=25), delay(SLOW, at="persist.write", step=24)),
    "load": (kill(rank=1, at="train.step", step=25), delay(SLOW, at="resume.load")),
}
TELLING = ("breakpoint flush", INT_THEN_TERM, 0.05)
PAIRS = ((TERM_TWICE, 0.0), (TERM_TWICE, 0.4), (INT_THEN_TERM, 0.05))
ALL = [(phase, *pair) for phase in AMID for pair in PAIRS]


@pytest.mark.parametrize(
    ("phase", "pair", "gap"), [pytest.param(*c, marks=() if c == TELLING else pytest.mark.campaign) for c in ALL]
)
def test_two_signals_in_a_phase_lose_nothing(
    new_job: Any, uninterrupted: Callable[..., Job], phase: str, pair: tuple[int, int], gap: float
) -> None:
    job = new_job().with_faults(*AMID[phase])
    disk = "1000" if phase == "breakpoint flush" else "10"
    job.start("--disk", disk)
    job.until(lambda: job.injected() == len(job.faults), f"the {phase}")
    for number in pair:
        job.process.send_signal(number)
        time.sleep(gap)
    # torch handles signals once workers have been started: before that they end the agent as any process.
    assert job.wait() in ((1, -signal.SIGTERM) if phase == "rendezvous" else (1,)), job.text()
    saved, stored = job.newest_saved() if job.ranks() else 0, max(job.stored(), default=0)
    print(phase, [number.name for number in pair], gap, saved, stored)
    assert stored >= saved, job.text()
    assert not job.arena().exists()
    job.faults.clear()
    job.run()
    assert not job.ranks() or stored in (0, *(step for step, _ in job.resumes())), job.text()
    assert_as_if_nothing_had_happened(job, uninterrupted(), 10)
