"""What a job does while a call fails: each is a function of a case and its job, named in `PROCEDURES`."""

from collections.abc import Callable

from tests.failing_calls.case import Case, Job


def begin(job: Job) -> None:
    """One step is durable, and a later one in memory."""
    job.start()
    job.load()
    job.save(1, "DISK")
    job.wait()
    job.save(2)


def save(case: Case, job: Job) -> None:
    """The first saves, for which memory is made, and one into a slot that was used."""
    job.start()
    job.load()
    with case.fault_here():
        for step in (1, 2, 3, 4):
            job.save(step)
    restart(job)


def persist(case: Case, job: Job) -> None:
    """A save that becomes durable."""
    job.start()
    job.load()
    job.save(1)
    with case.fault_here():
        job.save(2, "DISK")
        job.wait()
    restart(job)


def retention(case: Case, job: Job) -> None:
    """One that becomes durable, and has an older one deleted."""
    job.start()
    job.load()
    for step in (1, 2):
        job.save(step, "DISK")
        job.wait()
    with case.fault_here():
        job.save(3, "DISK")
        job.wait()
    restart(job)


def flush(case: Case, job: Job) -> None:
    """Workers die, and what they had in memory is flushed."""
    begin(job)
    with case.fault_here():
        job.workers_die()
        job.flushed()
    restart(job, dead=True)


def resume_from_memory(case: Case, job: Job) -> None:
    """Restarted workers load what their agent has in memory."""
    begin(job)
    job.workers_die()
    with case.fault_here():
        job.load_again_if_it_failed()
    job.go_on()


def resume_from_storage(case: Case, job: Job) -> None:
    """A new job loads what is durable."""
    before = Job(case)
    before.start()
    before.load()
    for step in (1, 2):
        before.save(step, "DISK")
        before.wait()
    before.end()
    case.memory = -1
    with case.fault_here():
        job.start()
        job.load_again_if_it_failed()
    job.go_on()


def adoption(case: Case, job: Job) -> None:
    """Agent and workers are killed; the next agent takes over their memory."""
    before = Job(case)
    begin(before)
    before.kill()
    with case.fault_here():
        job.start()
        job.load_again_if_it_failed()
    job.go_on()


PROCEDURES: dict[str, Callable[[Case, Job], None]] = {
    each.__name__.replace("_", " "): each
    for each in (save, persist, retention, flush, resume_from_memory, resume_from_storage, adoption)
}


def restart(job: Job, *, dead: bool = False) -> None:
    """Workers die, others come, and go on."""
    if not dead and job.workers:
        job.workers_die()
    job.load()
    job.go_on()
