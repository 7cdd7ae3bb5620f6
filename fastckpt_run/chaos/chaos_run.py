"""Kills in a running job, one after the other, each with a wait for the recovery."""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory.processes import Process, signal_together
from fastckpt._core.report.events import Event, text, whole
from fastckpt.errors import ConfigError
from fastckpt_run.chaos.job_events import ending, last, restarts_left
from fastckpt_run.chaos.kill_outcome import AGENT, NODE, RANK, ChaosSummary, KillOutcome
from fastckpt_run.chaos.resumed_bytes import Digests, bytes_in_memory, compare, whole_items
from fastckpt_run.chaos.running_job import LocalAgent, Ranks, RunningJob, agents_of
from fastckpt_run.formatting import count
from fastckpt_run.watch.unsaved_work import reached

PAUSE = 0.05
"""Seconds between two looks at the job."""
LAST_EVENTS = 5.0
"""Seconds for which the events of a resume are waited for: a thread of the agent writes them."""
END = 10.0
"""Seconds in which an agent that seems to be gone may still record how the job has ended."""


@dataclass(frozen=True)
class KillPlan:
    """Kind, times and number of the kills.

    Attributes:
        kind: RANK, AGENT or NODE.
        every: Seconds from one kill to the next.
        count: Kills, at most; None for any number.
        duration: Seconds after which there is no more kill; None for no end.
        seed: Chooses the ranks.
        number: The signal.
        limit: Seconds that the job may take to come back.
    """

    kind: str
    every: float
    count: int | None = None
    duration: float | None = None
    seed: int = 0
    number: int = signal.SIGKILL
    limit: float = 600.0

    @property
    def needed(self) -> int | None:
        """Kills that it makes, as far as that is known."""
        by_time = None if self.duration is None else int(self.duration / self.every)
        known = [each for each in (self.count, by_time) if each is not None]
        return min(known) if known else None


class _JobEnded(Exception):
    """The job has no agent any more."""


class ChaosRun:
    """Kills by a plan until it is done, the job has ended, or the user stops it.

    Args:
        job: The job.
        plan: Plan of the kills.
        note: Called with each outcome, once it is known.
    """

    def __init__(self, job: RunningJob, plan: KillPlan, note: Callable[[KillOutcome], None]) -> None:
        self._job, self._plan, self._note = job, plan, note
        self._random = random.Random(plan.seed)
        self._agents = list(job.agents)
        self._last_pids = [agent.process.pid for agent in job.agents]
        self._kills: list[KillOutcome] = []

    def warnings(self) -> list[str]:
        """Return warnings that the user should read before the first kill."""
        found, plan = [], self._plan
        left = self._restarts_left()
        if plan.kind == RANK and left is not None and (plan.needed is None or plan.needed > left):
            many = "as many kills as you let it make" if plan.needed is None else f"{plan.needed} kills"
            found.append(
                f"the job has {count(left, 'restart')} left for {many}, and gives up when none is left: start it with "
                "--max-restarts N, or have progress give some back with --fast-restart-budget 20/h"
            )
        if plan.kind != RANK:
            found.append(
                f"nobody but you, or what started it, starts a killed agent again: after each kill this waits "
                f"{plan.limit:g} s at most for a new one with {self._job.location}"
            )
        return found

    def run(self) -> ChaosSummary:
        """Kill until the end; Ctrl-C is one."""
        begun, plan = time.monotonic(), self._plan
        due, ended, how = begun + plan.every, "", ""
        try:
            while not (ended := self._is_done(due, begun)):
                self._wait_until_steady(due)
                due = time.monotonic() + plan.every
                self._one_kill()
                if self._kills and self._kills[-1].trouble:
                    ended = "nothing came back after the last kill"
                    break
        except KeyboardInterrupt:
            ended = "stopped by Ctrl-C"
        except _JobEnded as error:
            ended = "the job has ended"
            how = str(error)
        return ChaosSummary(self._kills, ended, how, time.monotonic() - begun)

    def _is_done(self, due: float, begun: float) -> str:
        plan = self._plan
        if plan.count is not None and len(self._kills) >= plan.count:
            return "1 kill is made" if plan.count == 1 else f"{plan.count} kills are made"
        if plan.duration is not None and due > begun + plan.duration:
            return f"{plan.duration:g} s are over"
        return ""

    # --- before a kill

    def _wait_until_steady(self, due: float) -> None:
        """Wait until it is time, and each rank has taken a step since its start."""
        end = max(due, time.monotonic()) + self._plan.limit
        while True:
            if not self._look():
                raise _JobEnded(self._last_words())
            now = time.monotonic()
            if now >= due and all(_is_steady(agent.telemetry()) for agent in self._agents):
                return
            if now > end:
                raise ConfigError(
                    f"the job with {self._job.location} has taken no step with all ranks in {self._plan.limit:g} s: "
                    "see what it waits for with fastckpt top, or give more with --limit"
                )
            time.sleep(PAUSE)

    def _look(self) -> list[LocalAgent]:
        """The agents that live now; [] if there are none."""
        self._agents = agents_of(self._job.location, self._job.shm_dir)
        self._last_pids = [agent.process.pid for agent in self._agents] or self._last_pids
        return self._agents

    # --- a kill and its outcome

    def _one_kill(self) -> None:
        # 1. checkpoints that count   2. the victims, which are who they were   3. the signal   4. the job's step, from
        # memory that nobody writes any more   5. the bytes in memory, before workers can replace them   6. the wait
        items = whole_items(self._job.location, str(self._job.shm_dir))
        # Of several nodes, this one's memory may hold a save that others do not.
        counting = [item for item in items if self._job.nodes == 1 or item.tier != "memory"]
        newest = next((item for item in counting if item.id), None)
        agent = self._random.choice(self._agents)
        local_rank, victims = self._victims(agent)
        at, instant = time.time(), time.monotonic()
        hit = signal_together(victims, self._plan.number)
        if not hit:
            return  # it had ended by itself meanwhile: the next look finds it
        kill = KillOutcome(
            len(self._kills) + 1,
            self._plan.kind,
            None if local_rank is None else self._rank(agent, local_rank),
            [victim.pid for victim in hit],
            at,
            step=max((step for each in agent.telemetry() if (step := reached(each)) is not None), default=None),
            held=newest.id if newest else None,
            held_in=newest.tier if newest else "",
        )
        self._kills.append(kill)
        try:
            at_kill = bytes_in_memory(whole_items(self._job.location, str(self._job.shm_dir)))
            self._wait_for_steps(kill, agent, instant)
            self._compare(kill, *at_kill)
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM or SIGHUP
            kill.stopped = kill.seconds is None
            raise
        finally:
            self._note(kill)

    def _victims(self, agent: LocalAgent) -> tuple[int | None, list[Process]]:
        if self._plan.kind == AGENT:
            return None, [agent.process]
        if self._plan.kind == NODE:
            # The agent first: it must not see its workers die.
            return None, [agent.process, *agent.workers]
        ranks = agent.telemetry()
        local_rank = self._random.randrange(len(ranks)) if ranks else 0
        worker = agent.worker(ranks[local_rank].pid) if ranks else None
        return local_rank, [worker] if worker else []

    def _rank(self, agent: LocalAgent, local_rank: int) -> int:
        """The rank of a local rank in the job; the local one where no event log has the other."""
        self._job.events.grow()
        ranks = last(self._job.events.of_agent(agent.process.pid), "rendezvous").get("ranks")
        if isinstance(ranks, list) and local_rank < len(ranks) and type(ranks[local_rank]) is int:
            return int(ranks[local_rank])
        return local_rank

    def _wait_for_steps(self, kill: KillOutcome, agent: LocalAgent, instant: float) -> None:
        """Wait until all ranks have taken a step since the kill, and record the resumed checkpoint."""
        end, since = time.monotonic() + self._plan.limit, int(instant * 1e9)
        gone_since = 0.0
        while True:
            now = time.monotonic()
            here = next((each for each in self._look() if each.arena == agent.arena), None)
            ranks = here.telemetry() if here else []
            if here and ranks and all(rank.first > since for rank in ranks):
                kill.seconds = max(rank.first for rank in ranks) / 1e9 - instant
                self._record_resume(kill, here, ranks, instant)
                return
            gone_since = 0.0 if here else gone_since or now
            if self._plan.kind == RANK and gone_since:
                self._record_end(kill, instant)
                return
            if now > end:
                missing = "no step" if here else "no new agent"
                kill.trouble = f"{missing} came in {self._plan.limit:g} s"
                return
            time.sleep(PAUSE)

    def _record_resume(self, kill: KillOutcome, agent: LocalAgent, ranks: Ranks, instant: float) -> None:
        loaded = min(rank.loaded for rank in ranks)
        kill.fresh = loaded < 0
        if kill.step is not None:
            kill.lost = max(0, kill.step - max(0, loaded))
        end = time.monotonic() + LAST_EVENTS
        found = list[Event]()
        while len(found) < len(ranks) and not kill.fresh and self._has_log(agent) and time.monotonic() < end:
            found = self._resumes(instant)
            time.sleep(PAUSE)
        self._take_tiers(kill, found)
        if kill.resumed is None and not kill.fresh:
            kill.resumed = SaveId(-1, loaded)
        kill.restarts_left = self._restarts_left()

    def _record_end(self, kill: KillOutcome, instant: float) -> None:
        """Record the outcome of a kill after which the job has ended: it may have come back, and been done soon."""
        how = self._last_words()
        found = self._resumes(instant)
        first = [event for event in self._job.events.since(instant) if event["event"] == "first_step"]
        if how != "succeeded" or not first:
            kill.trouble = f"the job has ended: {how}"
            return
        kill.seconds = max(event["monotonic"] for event in first) - instant
        self._take_tiers(kill, found)
        kill.fresh = not found
        if kill.step is not None:
            kill.lost = max(0, kill.step - (kill.resumed.step if kill.resumed else 0))

    def _resumes(self, instant: float) -> list[Event]:
        """Events of ranks that have loaded a checkpoint since, in this directory."""
        self._job.events.grow()
        return [
            event
            for event in self._job.events.since(instant)
            if event["event"] == "resumed" and text(event, "directory") == self._job.location
        ]

    def _take_tiers(self, kill: KillOutcome, found: list[Event]) -> None:
        saves = [SaveId(whole(event, "history", -1), whole(event, "step", -1)) for event in found]
        kill.resumed = min(saves, default=kill.resumed)
        kill.tiers = sorted({text(event, "tier") for event in found})

    def _compare(self, kill: KillOutcome, held: SaveId | None, at_kill: Digests) -> None:
        if kill.resumed is None or kill.resumed.history < 0:
            kill.digests_of = "" if kill.resumed is None else "no event log says which checkpoint it was"
            return
        known = at_kill if held == kill.resumed else {}
        kill.digests, kill.digests_of = compare(self._job.location, str(self._job.shm_dir), kill.resumed, known)

    # --- the job

    def _has_log(self, agent: LocalAgent) -> bool:
        self._job.events.grow()
        return bool(self._job.events.of_agent(agent.process.pid))

    def _ending(self) -> str:
        """Return the end of the job, as its event log has it."""
        self._job.events.grow()
        return next(filter(None, (ending(self._job.events.of_agent(pid)) for pid in self._last_pids)), "")

    def _last_words(self) -> str:
        """Return the end of the job, and wait for its log, the last thing that an agent writes."""
        end = time.monotonic() + END
        self._job.events.grow()
        has_log = any(self._job.events.of_agent(pid) for pid in self._last_pids)
        while has_log and not self._ending() and time.monotonic() < end:
            time.sleep(PAUSE)
        return self._ending() or "its agent is gone"

    def _restarts_left(self) -> int | None:
        self._job.events.grow()
        known = [restarts_left(self._job.events.of_agent(agent.process.pid)) for agent in self._agents]
        return min((left for left in known if left is not None), default=None)


def _is_steady(ranks: Ranks) -> bool:
    return bool(ranks) and all(rank.pid and rank.first for rank in ranks)
