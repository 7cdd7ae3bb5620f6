"""Second events: hosts and links fail, come or go while a job recovers from what happened before, or just after."""

import itertools
import os
import random
import signal
import subprocess
import time
from functools import partial

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.hosts import HOSTS, name_of
from tests.nodes.job import LAST_CALL
from tests.nodes.lineage import durable_in, line_of, runs_in
from tests.nodes.recovery import Line, Losses
from tests.support.json_lines import whole_lines

BATCHES = ("--batches", "12")
"""Of each step, on one to four hosts."""
SCRIPT = (*BATCHES, "--steps", "100000", "--memory", "5", "--disk", "10", "--pace", "0.15", "--digests")
LATEST = 4.0
"""Seconds after the first event within which the second one begins, if it does not wait for the recovery."""
STEPS = 8
"""Steps by which a host that trains is known."""
QUIET = 3.0
"""Seconds without a step after which a host waits without workers, or is about to."""
LOOK = 0.2
CLOSE = 0.02
"""Losses of worlds of several sizes differ by the order of sums."""
SEED = int(os.environ.get("FASTCKPT_SEED") or 1)

FIRST = ("partition", "heal", "loss", "restart", "newcomer", "leave")
SECOND = ("partition", "loss", "restart", "newcomer", "leave")
OF_HALVES = ("heal", "loss_of_half", "restart_of_waiting", "newcomer_of_waiting", "loss_of_waiting")
"""Of all hosts of the half that goes on, or of one of those that wait."""
CASES = [*itertools.product(FIRST, SECOND), *(("partition", second) for second in OF_HALVES)]


class Story:
    """A job that trains on all of its hosts, and what befalls it.

    Attributes:
        job: The job.
        told: All that has befallen it, with times.
    """

    def __init__(self, fleet: Fleet, hosts: int, rng: random.Random) -> None:
        self.job = fleet.job(range(hosts), *SCRIPT, nodes="1:6", stores=(0, 1, 2, 3), flags=LAST_CALL)
        self._rng, self._apart = rng, set[int]()
        self._leaving: dict[int, subprocess.Popen[bytes]] = {}
        self.told: list[str] = []
        self._begun = self._since = self.job.launch(*range(hosts))
        self.settle()

    def befall(self, event: str) -> None:
        """Have something happen, by its name, to a host of those that go on, or to those that the name has."""
        self._since = self._tell(event)
        what, _, whose = event.partition("_of_")
        side = self._newest_side()
        # Of several that go on, or of all that there are.
        going_on = sorted(side if len(side) > 1 else self.job.agents)
        others = sorted(self.job.agents.keys() - side)
        drawn = sorted(side) if whose == "half" else [self._rng.choice(others if whose else going_on)]
        for number in drawn:
            started = getattr(self, f"_{what}")(number)
        if whose == "waiting" and started is not None:
            self.job.until(partial(self._has_started, started), f"node{started} has a worker")

    def pause(self) -> None:
        """Wait for less than a recovery takes."""
        time.sleep(self._rng.uniform(0.0, LATEST))

    def settle(self) -> None:
        """Wait until some hosts that reach each other train, and make that durable; all others have no workers."""
        self.job.until(lambda: any(map(self._trains, self._sides())), "the job goes on")
        self._tell("it goes on")

    def end(self) -> None:
        """Undo what has befallen it: all hosts train in one world, and end well."""
        self._since = self._tell("all is undone")
        self._heal()
        for number, agent in self._leaving.items():
            assert agent.wait(150) == 1, f"the agent that leaves node{number}\n{self.job.text()}"
        for number in self._hosts - self.job.cluster.hosts.keys():
            self.job.cluster.add(number)
        self.job.launch(*self._hosts - self.job.agents.keys())
        self.settle()
        self.job.end()

    # --- what befalls it

    def _partition(self, _: int) -> None:
        """Split the hosts in two; those that are split, in two others."""
        hosts = {*self.job.cluster.hosts}
        sizes = range(1, len(hosts) // 2 + 1)
        ways = [{*way} for size in sizes for way in itertools.combinations(sorted(hosts), size)]
        way = self._rng.choice([way for way in ways if self._apart & hosts not in (way, hosts - way)])
        self._heal()
        self._apart = way
        self.job.cluster.split(*way)
        self._tell(f"{sorted(way)} reach no other of {sorted(hosts)}")

    def _heal(self, _: int = 0) -> None:
        if self._apart:
            self.job.cluster.join(*self._apart & self.job.cluster.hosts.keys())
        self._apart = set()

    def _loss(self, number: int) -> None:
        self._tell(f"node{number} is lost")
        self.job.lose(number)

    def _restart(self, number: int) -> int:
        self._tell(f"node{number} restarts")
        self.job.kill_node(number)
        self.job.launch(number)
        return number

    def _newcomer(self, near: int) -> int:
        number = max(self._hosts) + 1
        self._tell(f"node{number} comes, and reaches node{near}")
        self.job.cluster.add(number)
        if near in self._apart:
            self._apart.add(number)
            self.job.cluster.split(number)
        self.job.launch(number)
        return number

    def _leave(self, number: int) -> None:
        os.kill(self.job.agent_pid(number), signal.SIGTERM)
        self._leaving[number] = self.job.agents.pop(number)
        self._tell(f"node{number} leaves")

    # --- who there is

    @property
    def _hosts(self) -> set[int]:
        """All that ever were there."""
        return {number for number in range(HOSTS) if (self.job.out / f"output.{name_of(number)}").exists()}

    def _sides(self) -> list[set[int]]:
        """The hosts with agents that reach each other."""
        there = {*self.job.agents}
        return [side for side in (there - self._apart, there & self._apart) if side]

    def _newest_side(self) -> set[int]:
        """The hosts with agents that reach the one which made the last step."""
        return max(self._sides(), key=lambda side: max(map(self._last_step, side)))

    # --- what the job does

    def _trains(self, nodes: set[int]) -> bool:
        """Whether these nodes, and no others, train in one world, and make that durable."""
        time.sleep(LOOK)
        others = self.job.agents.keys() - nodes
        return (
            all(self._steps(number, len(nodes)) >= STEPS for number in nodes)
            and all(time.monotonic() - self._last_step(number) > QUIET for number in others)
            and any(line["monotonic"] > self._since for number in nodes for line in saves(self.job.events(number)))
        )

    def _steps(self, number: int, world: int) -> int:
        """Steps that the newest worker of a node, if its world has this size, has done since the last event."""
        lines = self.job.lines(number)
        first = max((index for index, line in enumerate(lines) if line["what"] == "started"), default=len(lines))
        own = lines[first:]
        is_of_world = bool(own) and own[0]["world"] == world
        return sum(line["what"] == "step" and line["at"] > self._since for line in own) if is_of_world else 0

    def _has_started(self, number: int) -> bool:
        """Whether a worker of a node was started since the last event."""
        return any(line["what"] == "started" and line["at"] > self._since for line in self.job.lines(number))

    def _last_step(self, number: int) -> float:
        return max((line["at"] for line in self.job.lines(number) if line["what"] == "step"), default=0.0)

    def _tell(self, what: str) -> float:
        now = time.monotonic()
        self.told.append(f"{now - self._begun:6.1f} s: {what}")
        return now


def saves(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["event"] in ("persisted", "flush_done")]


def assert_one_line(story: Story) -> None:
    """All that is durable is of one line of states, bit for bit; no agent that had lost the directory saved there."""
    job = story.job
    for path in (job.cluster.storage / ".fastckpt" / "events").iterdir():
        lost = None
        for line in whole_lines(path):
            lost = {"superseded": line, "rendezvous": None}.get(line["event"], lost)
            assert lost is None or not saves([line]), f"{line} after {lost}"
    line = line_of([run for number in range(HOSTS) for run in runs_in(job.lines(number))])
    durable = durable_in(job.cluster.storage)
    assert durable
    assert {step: line.get(step) for step in durable} == durable


def assert_close(losses: Losses, reference: Losses) -> None:
    """All losses of all worlds are those of a run that nothing befell, but for the order of sums."""
    far = [
        (place, loss, expected)
        for place, found in losses.items()
        for expected in reference.get(place, ())
        for loss in found
        if abs(float.fromhex(loss) - float.fromhex(expected)) > CLOSE
    ]
    assert not far, far[:5]


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("early", [True, False], ids=["meanwhile", "afterwards"])
@pytest.mark.parametrize(("first", "second"), CASES, ids=lambda case: case)
def test_a_job_survives_a_second_event_while_it_recovers_from_the_first_and_after_that(
    fleet: Fleet, first: str, second: str, early: bool
) -> None:
    """No host hangs, no state of another line is durable, and no agent ends but those that are ended."""
    rng = random.Random(f"{SEED} {first} {second} {early}")
    fresh = sum(event.startswith("newcomer") for event in (first, second))
    story = Story(fleet, 4 - fresh if fresh else rng.choice((3, 4)), rng)
    try:
        if first == "heal":
            story.befall("partition")
            story.settle()
        story.befall(first)
        story.pause() if early else story.settle()
        story.befall(second)
        story.settle()
        story.end()
        assert_one_line(story)
    finally:
        print(*story.told, sep="\n")
    assert_close(story.job.losses(), fleet.uninterrupted(*BATCHES, "--steps", "200", ranks=1))
