"""Costs of agents and savers with many of their kind."""

from collections.abc import Callable
from functools import partial

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Goal, Values
from benchmarks.harness.turn import Turn


def meet(count: int, turn: Turn) -> Values:
    """Two rounds of so many agents."""
    from benchmarks.suite.growth._rendezvous_agents import rendezvous

    return rendezvous(count)


def report(count: int, turn: Turn) -> Values:
    """Saves that so many agents report to the first."""
    from benchmarks.suite.growth._reporting_agents import processor_of_first

    return processor_of_first(count)


def save(count: int, turn: Turn) -> Values:
    """Saves of so many ranks of a node."""
    from benchmarks.suite.growth._saver_ranks import thread_seconds

    return {"thread": thread_seconds(count, turn.folder)}


def contenders(title: str, measure: Callable[[int, Turn], Values], *counts: int) -> list[Contender]:
    """A contender for each number, of which the first is quick."""
    return [Contender(f"{title} of {count}", partial(measure, count), quick=count == counts[0]) for count in counts]


BENCHMARK = Benchmark(
    name="agents",
    question="What do many agents and ranks cost?",
    work="Agents are threads of some processes with connections as real ones have.",
    contenders=[
        *contenders("rendezvous", meet, 64, 512, 1024),
        *contenders("reports", report, 64, 1024),
        *contenders("saver", save, 8, 64),
    ],
    figures=[
        *(
            Figure(f"rendezvous of {count}", f"rendezvous of {count}.first", goal=goal)
            for count, goal in ((64, None), (512, None), (1024, Goal("at most", 3)))
        ),
        Figure("messages of an agent, 1,024", "rendezvous of 1024.messages", goal=Goal("at most", 20), unit=""),
        Figure("agents that expire meanwhile, 1,024", "rendezvous of 1024.expired", unit="", is_detail=True),
        Figure("first agent's processor time for a save, 1,024", "reports of 1024.processor"),
        Figure(
            "saver's processor time for a save and rank, 64", "saver of 64.thread", "", Goal("at most", 0.2), "ms", 1e3
        ),
        *(
            Figure(f"{name}: {what}", f"{name}.{what}", is_detail=True)
            for name, what in (("reports of 64", "processor"), ("saver of 8", "thread"))
        ),
    ],
    rounds=2,
    gigabytes=0.0,
)
