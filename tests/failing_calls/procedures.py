"""What a job does before, while and after a call fails: names of methods of `Job`, with arguments after colons."""

from dataclasses import dataclass

from tests.failing_calls.case import Case, Job

BEGIN = "start load save:1:DISK wait save:2"
"""One step is durable, and a later one in memory."""


@dataclass(frozen=True)
class Procedure:
    """What a job does.

    Attributes:
        before: What is done while all is sound.
        faulty: While the call fails.
        after: When it does not any more.
        earlier: What an earlier job has done, which was ended or killed.
    """

    before: str
    faulty: str
    after: str = "restart"
    earlier: str = ""

    def __call__(self, case: Case, job: Job) -> None:
        if self.earlier:
            do(Job(case), self.earlier)
            case.memory = case.memory if self.earlier.endswith("kill") else -1
        do(job, self.before)
        with case.fault_here():
            do(job, self.faulty)
        do(job, self.after)


def do(job: Job, words: str) -> None:
    for word in words.split():
        name, *arguments = word.split(":")
        getattr(job, name)(*(int(each) if each.isdigit() else each for each in arguments))


PROCEDURES = {
    # memory is made for the first saves, and one goes into a slot that was used
    "save": Procedure("start load", "save:1 save:2 save:3 save:4"),
    "persist": Procedure("start load save:1", "save:2:DISK wait"),
    # of three that are durable, the oldest is deleted
    "retention": Procedure("start load save:1:DISK wait save:2:DISK wait", "save:3:DISK wait"),
    "flush": Procedure(BEGIN, "workers_die flushed"),
    "resume from memory": Procedure(f"{BEGIN} workers_die", "load_again_if_it_failed", "go_on"),
    "resume from storage": Procedure(
        "", "start load_again_if_it_failed", "go_on", earlier="start load save:1:DISK wait save:2:DISK wait end"
    ),
    "adoption": Procedure("", "start load_again_if_it_failed", "go_on", earlier=f"{BEGIN} kill"),
}
