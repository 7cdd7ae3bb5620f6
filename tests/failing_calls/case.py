"""One case: a job in which a call fails, what it promised, and what became of that."""

import contextlib
import errno
import os
import select
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fastckpt._core.memory.telemetry import BLOCKS
from tests.failing_calls.job import DEADLINE, DURABLE, WORLD, Hung, Process, agent, environment_of, worker
from tests.failing_calls.page import Fault, Page

DAMAGE = ("open", "list", "stat", "read", "mmap", "close")
"""Calls whose EIO says that what is read is damaged: then an older checkpoint may be resumed."""
STOPPED = "stopped"
"""In the place of what a rank raises that did not come to an end, since another has raised something."""
GRACE = 0.5
"""Seconds that it has for it: two ranks often raise the same."""
PAUSE = 0.02


class Unreached(Exception):
    """The call is not made in this run: how threads take turns decides on some."""


@dataclass
class Outcome:
    """What came of a case.

    Attributes:
        where: The call that failed; empty if it was never reached.
        bad: What broke a promise.
        said: What users were told: errors, reasons, troubles.
        made: Where nothing failed: the calls of each process.
    """

    where: str = ""
    bad: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    made: list[tuple[str, str, int]] = field(default_factory=list)


class Case:
    """The folders of a case, the fault in it, and what was promised so far.

    Attributes:
        directory: The checkpoint directory.
        shm: Where the agent has its arenas.
        durable: The newest step that was promised to be durable; -1 for none.
        memory: The newest one that was promised to be in memory, as long as it is.
        older: The newest durable one before that.
    """

    def __init__(self, folder: Path, shm: Path, page: Page, fault: Fault | None, place: str) -> None:
        self.folder, self.shm, self.page, self.fault, self._place = folder, shm, page, fault, place
        self.directory = folder / "storage"
        self.log = folder / "log"
        self.durable = self.older = self.memory = -1
        self.outcome = Outcome()
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.generations = 0
        self.faulty = False

    @contextlib.contextmanager
    def fault_here(self) -> Iterator[None]:
        """While this lasts, the call may fail."""
        within = self.directory if self._place == "storage" else self.shm
        self.page.count(within) if self.fault is None else self.page.arm(self.fault, within)
        self.faulty = True
        try:
            yield
        finally:
            self.page.disarm()
            self.faulty = False
            self.outcome.where = self.page.where
            self.outcome.made = [(role, call, number) for (role, call), number in self.page.made.items()]
        if self.fault is not None and not self.outcome.where:
            raise Unreached

    @property
    def may_be_damage(self) -> bool:
        return self.fault is not None and self.fault.error == "EIO" and self.fault.call in DAMAGE

    def bad(self, text: str) -> None:
        self.outcome.bad.append(text)

    def said(self, text: str) -> None:
        """Take note of what a user was told; outside the fault nothing goes wrong, and it names what failed."""
        self.outcome.said.append(text)
        if not self.faulty:
            self.bad(f"a sound job is told: {text}")
        elif not any(part in text for part in self._names()):
            self.bad(f"does not name what failed: {text}")

    def _names(self) -> list[str]:
        number = getattr(errno, self.fault.error, 0) if self.fault else 0
        return [str(self.directory), str(self.shm), "shared memory", *([os.strerror(number)] if number else [])]

    def promise_durable(self, step: int | None) -> None:
        if step is not None and step > self.durable:
            self.older, self.durable = self.durable, step

    def judge_load(self, answers: list[dict[str, Any]]) -> bool:
        """Compare what ranks have loaded with what was promised; False if they could not load."""
        for answer in answers:
            if "raised" in answer:
                self.judge_error("load", answer)
        loaded = [answer["value"] for answer in answers if "value" in answer]
        for each in loaded:
            if not each["right"]:
                self.bad(f"WRONG STATE at step {each['step']} from {each['tier']}")
        if len(loaded) < len(answers):
            return False
        steps = {each["step"] for each in loaded}
        if len(steps) > 1:
            self.bad(f"UNLIKE STEPS {steps}")
        step, passed = min(steps), self.may_be_damage
        if step < (self.older if passed else self.durable):
            self.bad(f"LOST DURABLE step {self.durable}: loaded {step} from {loaded[0]['tier']}")
        elif step < self.memory and not passed:
            self.bad(f"LOST MEMORY step {self.memory}: loaded {step} from {loaded[0]['tier']}")
        self.memory = step
        self.durable = min(self.durable, step)  # what was passed over is of another line
        return True

    def judge_error(self, what: str, answer: dict[str, Any]) -> None:
        text = f"{what}: {answer['raised']}: {answer['text']}"
        if answer["raised"] == STOPPED:
            return
        if not answer["ours"]:
            self.bad(f"RAW ERROR {text[:300]}")
        self.said(text[:600])

    def run(self, procedure: Any) -> Outcome:
        """Carry out a procedure, then a later sound job."""
        self.directory.mkdir(parents=True)
        self.shm.mkdir(parents=True, exist_ok=True)
        job = Job(self)
        try:
            procedure(self, job)
            job.end()
            self.later_job()
            if left := self._left():
                self.bad(f"LEFT in shared memory: {sorted(map(str, left))}")
        except Unreached:
            pass
        except Hung as error:
            self.bad(f"HANG: {error}")
        finally:
            self.page.disarm()
            job.kill()
        log = self.log.read_text(errors="replace") if self.log.exists() else ""
        if self.outcome.bad:
            self.outcome.said.append(log[-6000:])
        for path in self._left():  # of a case that came to no end
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        shutil.rmtree(self.shm, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.outcome

    def _left(self) -> list[Path]:
        """What is in shared memory: in arenas, and blocks that are named after these."""
        return [*self.shm.rglob("*"), *BLOCKS.glob(f"*{str(self.shm).strip('/').replace('/', '.')}*")]

    def later_job(self) -> None:
        """A sound job resumes what is durable, saves, and ends; nothing is left of it in memory."""
        self.memory = -1
        job = Job(self)
        try:
            job.start()
            if job.load():
                job.go_on()
            job.end()
        finally:
            job.kill()


class Job:
    """The agent and the workers of a case, until they are killed or have ended."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.agent: Process | None = None
        self.workers: list[Process] = []
        self._address = ""
        self._restarts = -1

    def start(self) -> None:
        """Start the agent."""
        self.agent = Process("agent", lambda: agent(self._case.shm), self._case.log)
        self._address = self.agent.ask("address")["value"]

    def load(self) -> bool:
        """Start workers, which load; False if they could not. Then they are dead."""
        case = self._case
        case.generations, self._restarts = case.generations + 1, self._restarts + 1
        name, port, directory = str(case.generations), case.store.port, str(case.directory)
        for rank in range(WORLD):
            environment = environment_of(rank, self._address, self._restarts, case.shm)
            make = partial(worker, environment, port, name, directory)
            self.workers.append(Process(f"rank {rank}", make, case.log))
        is_loaded = case.judge_load(self._ask_all("load"))
        if not is_loaded:
            self.workers_die()
        return is_loaded

    def load_again_if_it_failed(self) -> None:
        """Load as a launcher has it done: where workers have failed, others are started, and nothing fails any more."""
        if not self.load():
            self._case.page.disarm()
            self._case.faulty = False
            if not self.load():
                self._case.bad("DOES NOT LOAD after a restart")

    def save(self, step: int, kind: str = "MEMORY") -> bool:
        """Save a step on all ranks: whether all say that they have."""
        answers = self._ask_all("save", step, kind)
        for answer in answers:
            if "raised" in answer:
                self._case.judge_error(f"save {step}", answer)
            elif not answer["value"]["saved"]:
                self._case.said(f"save {step} skipped: {answer['value']['reason']}")
        is_saved = bool(answers) and all("value" in answer and answer["value"]["saved"] for answer in answers)
        if is_saved:
            self._case.memory = step
        if any("raised" in answer for answer in answers):
            self.workers_die()
        return is_saved

    def wait(self) -> None:
        """Wait until what was saved is durable."""
        for answer in self._ask_all("wait"):
            if answer.get("raised") == "TimeoutError":
                self._case.bad(f"NOT DURABLE: {answer['text']}")
            elif "raised" in answer:
                self._case.judge_error("wait", answer)
            else:
                self._case.promise_durable(answer["value"])

    def go_on(self) -> None:
        """Save as a sound job does, durably: the fault is over."""
        step = max(self._case.memory, self._case.durable, 0) + 10
        if not self.workers:
            return
        self.save(step, "DISK")
        end = time.monotonic() + DURABLE
        while self._case.durable < step and time.monotonic() < end:
            answers = self._ask_all("wait")
            for answer in answers:
                if "value" in answer:
                    self._case.promise_durable(answer["value"])
            if self._case.durable < step:
                time.sleep(0.2)
        if self._case.durable < step:
            self._case.bad(f"DOES NOT GO ON: step {step} is not durable: {answers}")

    def workers_die(self) -> None:
        """Kill the workers; the agent pins and flushes what they have saved."""
        self._kill_workers()
        if self.agent:
            self._demand("breakpoint", self.agent.ask("breakpoint"))

    def restart(self) -> None:
        """Workers die, if they have not, others come, and go on."""
        if self.workers:
            self.workers_die()
        self.load()
        self.go_on()

    def flushed(self) -> None:
        """Wait until what is in memory is durable, or has failed to be, if that can be no other way."""
        assert self.agent
        end = time.monotonic() + DURABLE
        while time.monotonic() < end:
            seen = self.agent.ask("seen")["value"]
            self._case.promise_durable(seen["durable"])
            lasts = self._case.fault is not None and self._case.fault.forever
            if (seen["durable"] or -1) >= (seen["memory"] or 0) or (lasts and seen["failure"]):
                return
            time.sleep(PAUSE)
        self._case.bad(f"NOT FLUSHED: {seen}")

    def end(self) -> None:
        """The good end: ranks close, then the agent."""
        for answer in self._ask_all("close") if self.workers else ():
            self._demand("close", answer)
        self._kill_workers()
        if self.agent:
            answer = self.agent.ask("close")
            self._demand("close of the agent", answer)
            if "value" in answer:
                self._case.promise_durable(answer["value"].get("durable"))
                if answer["value"]["unfinished"]:
                    self._case.bad("the agent has left a persist unfinished")
        self.kill()

    def _demand(self, what: str, answer: dict[str, Any]) -> None:
        if "raised" in answer:
            self._case.judge_error(what, answer)

    def _ask_all(self, name: str, *arguments: Any) -> list[dict[str, Any]]:
        """Have all ranks do something together; once one has failed, the others are stopped, as a launcher does."""
        workers = [*self.workers]
        for each in workers:
            each.tell(name, *arguments)
        answers: dict[Process, dict[str, Any]] = {}
        while len(answers) < len(workers):
            left = [each for each in workers if each not in answers]
            failed = any("raised" in answer for answer in answers.values())
            ready, _, _ = select.select(left, [], [], GRACE if failed else DEADLINE)
            if not ready and failed:
                break
            answers |= {each: each.answer() for each in ready or left[:1]}
        return [answers.get(each, {"raised": STOPPED, "text": "", "ours": True}) for each in workers]

    def _kill_workers(self) -> None:
        for each in self.workers:
            each.kill()
        self.workers.clear()

    def kill(self) -> None:
        """Kill workers and agent, where they are."""
        self._kill_workers()
        if self.agent:
            self.agent.kill()
            self.agent = None


# --- what a job does before, while and after a call fails: names of its methods, with arguments after colons

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
