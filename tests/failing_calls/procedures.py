"""What a job does while a call fails: each is a function of a case and its job, named in `PROCEDURES`."""

from collections.abc import Callable

from tests.failing_calls.case import Case, Job


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
    job.start()
    job.load()
    job.save(1, "DISK")
    job.wait()
    job.save(2)
    with case.fault_here():
        job.workers_die()
        job.flushed()
    restart(job, dead=True)


def resume_from_memory(case: Case, job: Job) -> None:
    """Restarted workers load what their agent has in memory."""
    job.start()
    job.load()
    job.save(1, "DISK")
    job.wait()
    job.save(2)
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
    before.start()
    before.load()
    before.save(1, "DISK")
    before.wait()
    before.save(2)
    before.kill()
    with case.fault_here():
        job.start()
        job.load_again_if_it_failed()
    job.go_on()


def copy_to_a_peer(case: Case, job: Job) -> None:
    """Each of two nodes keeps what the other alone has; then one is lost, with its memory."""
    job.nodes = 2
    job.start()
    job.meet()
    job.load()
    job.save(1, "DISK")
    job.wait()
    with case.fault_here():
        if job.save(2):
            job.until_common(2)
    replace_node(job)


def resume_from_a_peer(case: Case, job: Job) -> None:
    """A fresh node gets its rank's state from the other one."""
    job.nodes = 2
    job.start()
    job.meet()
    job.load()
    job.save(1, "DISK")
    job.wait()
    job.save(2)
    job.until_common(2)
    job.workers_die()
    job.kill_node(1)
    case.fetches = True
    with case.fault_here():
        job.start_agent(1)
        job.meet()
        job.load_again_if_it_failed()
    job.go_on()


PROCEDURES: dict[str, Callable[[Case, Job], None]] = {
    each.__name__.replace("_", " "): each
    for each in (
        save,
        persist,
        retention,
        flush,
        resume_from_memory,
        resume_from_storage,
        adoption,
        copy_to_a_peer,
        resume_from_a_peer,
    )
}


def restart(job: Job, *, dead: bool = False) -> None:
    """Workers die, others come, and go on."""
    if not dead and job.workers:
        job.workers_die()
    job.load()
    job.go_on()


def replace_node(job: Job) -> None:
    """The second node is lost, and a fresh one comes in its place."""
    if job.workers:
        job.workers_die()
    job.kill_node(1)
    job.start_agent(1)
    job.meet()
    job.load()
    job.go_on()
