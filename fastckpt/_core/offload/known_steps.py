"""Profiled steps, each with its plan, and the match of a forward with them."""

from dataclasses import dataclass

from fastckpt._core.offload.forward_pass import ForwardPass
from fastckpt._core.policy.offload_plan import OffloadPlan

MOST = 8
"""Different steps that are known at once, such as those of several models, or of batches of several lengths."""


@dataclass(frozen=True)
class KnownStep:
    """A step that was profiled.

    Attributes:
        sizes: Bytes of its forward's saved tensors, in order: by these another forward is compared with it.
        order: The entries in the order in which its backward needed them.
        plan: Plan for each.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    plan: OffloadPlan


class KnownSteps:
    """The steps of a training run that were profiled, the last used one first."""

    def __init__(self) -> None:
        self._steps: list[KnownStep] = []

    @property
    def is_empty(self) -> bool:
        """True if no step was profiled yet."""
        return not self._steps

    def match(self) -> "StepMatch":
        """The comparison of a forward that begins with all known steps."""
        return StepMatch(list(self._steps))

    def learn(self, step: KnownStep) -> None:
        """Use this step before all others."""
        self._steps = [step, *(each for each in self._steps if each.sizes != step.sizes)][:MOST]

    def find(self, forward: ForwardPass) -> KnownStep | None:
        """The known step with the same saved tensors."""
        sizes = tuple(each.size for each in forward.entries)
        return next((each for each in self._steps if each.sizes == sizes), None)


class StepMatch:
    """The known steps that a forward may be, by its saved tensors so far."""

    def __init__(self, candidates: list[KnownStep]) -> None:
        self._candidates = candidates
        self._count = 0

    @property
    def step(self) -> KnownStep | None:
        """The step that it is taken for; None if it is none of them: then all is offloaded, and profiled."""
        return self._candidates[0] if self._candidates else None

    def takes_away(self, size: int) -> tuple[bool, bool]:
        """Return whether to offload the next saved storage, which has this size, and whether to compress it."""
        index, self._count = self._count, self._count + 1
        if self._candidates:
            fits = [each for each in self._candidates if index < len(each.sizes) and each.sizes[index] == size]
            self._candidates = fits
        if self.step is None:
            return True, False
        return index in self.step.plan.offloaded, index in self.step.plan.compressed
