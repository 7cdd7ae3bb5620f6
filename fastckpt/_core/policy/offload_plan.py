"""The choice of saved tensors that go to storage, from one profiled step, so that transfers hide behind compute.

It follows FlashNeuron (Bae et al., FAST'21) in two phases. First, as many of the first tensors go as must; then, if
these transfers take too long, compressible ones in the place of others. Unlike theirs, plans are judged by a model
of the whole step: writes against the forward, reads against the backward, memory against the budget.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, product

from fastckpt._core.policy.offload_step import (
    Outcome,
    SavedTensor,
    StepProfile,
    in_flight_limit,
    room,
    simulate,
)
from fastckpt.errors import ConfigError

__all__ = ["OffloadPlan", "SavedTensor", "StepProfile", "in_flight_limit", "plan", "room"]

WORK = 60_000
"""Tensors in all plans that are tried after both phases: in all that there are, if that is enough, else with one change
at a time. About a third of a second.
"""
NEGLIGIBLE = 1e-6
"""The part of a step that counts as no wait: errors of rounding."""


@dataclass(frozen=True)
class OffloadPlan:
    """Plan for the tensors that a forward saves.

    Attributes:
        offloaded: Tensors that are written to storage, by their place in the order of the forward.
        compressed: Tensors among them that are compressed first.
        resident: Bytes that stay in memory.
        peak: Most bytes in memory at a time, those in transfer included.
        written: Bytes that are written, as far as a sample can tell.
        predicted_wait: Seconds by which the step is longer than without a budget.
    """

    offloaded: frozenset[int]
    compressed: frozenset[int]
    resident: int
    peak: int
    written: int
    predicted_wait: float


def plan(profile: StepProfile, budget: int, *, work: int = WORK) -> OffloadPlan:
    """Choose the tensors to write, so that the others fit the budget and the step waits as little as possible.

    A quarter of the budget is for tensors in flight: the others take at most three quarters, unless all fit.

    Args:
        profile: One step as it was measured.
        budget: Bytes of saved tensors that may be in memory.
        work: Tensors in all plans that are tried if both phases find none that costs nothing.
    """
    if budget < 0:
        raise ConfigError(f"budget is {budget} bytes; it must be at least 0")
    search = _Search(profile, budget)
    if search.lacking(frozenset()) <= 0:
        return search.best.as_plan
    for choice in chain(search.in_forward_order(), search.by_compressibility()):
        if search.consider(choice):
            return search.pruned().as_plan
    tries = work // len(profile.tensors)
    for choice in islice(search.all_choices(tries), tries):
        if search.consider(choice):
            break
    return search.pruned().as_plan


@dataclass(frozen=True)
class _Choice:
    offloaded: frozenset[int]
    compressed: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Judged:
    choice: _Choice
    outcome: Outcome
    resident: int
    written: int

    @property
    def cost(self) -> tuple[float, int, int]:
        """Time first, then wear of the disk, then work for the processor."""
        return self.outcome.wait, self.written, len(self.choice.compressed)

    @property
    def as_plan(self) -> OffloadPlan:
        choice, outcome = self.choice, self.outcome
        return OffloadPlan(choice.offloaded, choice.compressed, self.resident, outcome.peak, self.written, outcome.wait)


class _Search:
    """Plans for one profile and budget, and the best of those that were considered."""

    def __init__(self, profile: StepProfile, budget: int) -> None:
        self._profile, self._budget = profile, budget
        self._sizes = [tensor.size for tensor in profile.tensors]
        self._total = sum(self._sizes)
        self._pays = {index for index in range(len(self._sizes)) if profile.pays(index)}
        self._negligible = NEGLIGIBLE * (profile.forward + profile.backward)
        everything = frozenset(range(len(self._sizes)))
        self.best = self._judge(_Choice(frozenset() if self._total <= budget else everything))

    def lacking(self, offloaded: frozenset[int]) -> int:
        """Bytes that are too many in memory if these tensors are written."""
        if not offloaded and self._total <= self._budget:
            return 0
        return self._total - sum(self._sizes[index] for index in offloaded) - room(self._budget)

    def consider(self, choice: _Choice) -> bool:
        """Keep a plan that fits if it is the best so far; whether it costs nothing."""
        if self.lacking(choice.offloaded) > 0:
            return False
        judged = self._judge(choice)
        if judged.cost < self.best.cost:
            self.best = judged
        return judged.outcome.wait == 0

    def in_forward_order(self) -> Iterator[_Choice]:
        """Phase 1: the first tensors, until the rest fits. The first ones have most time, and are needed last."""
        yield _Choice(self._covered(frozenset()))

    def by_compressibility(self) -> Iterator[_Choice]:
        """Phase 2: compress the chosen; then give up the last incompressible one for the most compressible others."""
        offloaded = self._covered(frozenset())
        compressed = frozenset[int]()
        for index in self._most_compressible(offloaded):
            compressed |= {index}
            yield _Choice(offloaded, compressed)
        others = self._most_compressible(frozenset(range(len(self._sizes))) - offloaded)
        for given_up in sorted(offloaded - compressed, reverse=True):
            taken, size = list[int](), 0
            while others and size < self._sizes[given_up]:
                taken.append(others.pop(0))
                size += self._sizes[taken[-1]]
            if size < self._sizes[given_up]:
                return
            offloaded = (offloaded - {given_up}) | set(taken)
            compressed |= set(taken)
            yield _Choice(offloaded, compressed)

    def all_choices(self, tries: int) -> Iterator[_Choice]:
        """All plans, if they are few; else the best so far with one tensor in the place of another, again and again."""
        states = [(0, 1, 2) if index in self._pays else (0, 1) for index in range(len(self._sizes))]
        count = 1
        for each in states:
            count *= len(each)
        if count > tries:
            yield from self._changed()
            return
        for state in product(*states):
            yield _Choice(
                frozenset(index for index, kind in enumerate(state) if kind),
                frozenset(index for index, kind in enumerate(state) if kind == 2),
            )

    def pruned(self) -> _Judged:
        """The best plan without the tensors that need not go, the last ones first: they are needed soonest."""
        for index in sorted(self.best.choice.offloaded, reverse=True):
            choice = self.best.choice
            self.consider(_Choice(choice.offloaded - {index}, choice.compressed - {index}))
        # Compression is work for the processor: none of it without need.
        for index in sorted(self.best.choice.compressed):
            choice = self.best.choice
            judged = self._judge(_Choice(choice.offloaded, choice.compressed - {index}))
            if judged.outcome.wait <= self.best.outcome.wait:
                self.best = judged
        return self.best

    def _changed(self) -> Iterator[_Choice]:
        start = None
        while start != self.best.choice:
            start = self.best.choice
            for index in sorted(self._pays & start.offloaded):
                yield _Choice(start.offloaded, start.compressed ^ {index})
            for given_up in sorted(start.offloaded, reverse=True):
                rest = _Choice(start.offloaded - {given_up}, start.compressed - {given_up})
                for other in sorted(set(range(len(self._sizes))) - start.offloaded):
                    offloaded = self._covered(rest.offloaded | {other}, without=given_up)
                    yield _Choice(offloaded, rest.compressed | (self._pays & {other}))
                    if self.best.choice != start:
                        break

    def _covered(self, offloaded: frozenset[int], without: int = -1) -> frozenset[int]:
        """These tensors, and as many of the first others as must go too."""
        lacking = self.lacking(offloaded)
        for index, size in enumerate(self._sizes):
            if lacking <= 0:
                break
            if index not in offloaded and index != without:
                offloaded |= {index}
                lacking -= size
        return offloaded

    def _most_compressible(self, indices: frozenset[int]) -> list[int]:
        return sorted(self._pays & indices, key=lambda index: (self._profile.tensors[index].ratio, index))

    def _judge(self, choice: _Choice) -> _Judged:
        outcome = simulate(self._profile, self._budget, choice.offloaded, choice.compressed)
        if outcome.wait <= self._negligible:
            outcome = Outcome(0.0, outcome.peak)
        tensors = self._profile.tensors
        written = sum(
            round(tensors[index].size * (tensors[index].ratio if index in choice.compressed else 1))
            for index in choice.offloaded
        )
        return _Judged(choice, outcome, self._total - sum(self._sizes[index] for index in choice.offloaded), written)
