"""One training step under an offload plan, as a model: when the step waits for the disk, and the memory it takes."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf, isfinite

from fastckpt.errors import ConfigError

IN_FLIGHT = 4
"""One part of so many of the budget is for tensors that are being written."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a forward saves for its backward.

    Attributes:
        size: Bytes.
        packed: Seconds from the begin of the forward until it is saved.
        needed: Seconds from the begin of the backward until it is fetched.
        ratio: Bytes of its compressed form per byte, estimated from a sample; 1.0 if nothing is gained.
    """

    size: int
    packed: float
    needed: float
    ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.size < 0 or not 0 <= self.ratio <= 1 or not (isfinite(self.packed) and isfinite(self.needed)):
            raise ConfigError(f"{self} must have a size of at least 0, finite times and a ratio between 0 and 1")


@dataclass(frozen=True)
class StepProfile:
    """One step as it was measured.

    Attributes:
        tensors: In the order in which the forward saved them.
        forward: Seconds of the forward.
        backward: Seconds of the backward.
        write_rate: Bytes per second that storage takes.
        read_rate: Bytes per second that storage gives.
        encode_rate: Bytes per second, before compression, that a writer compresses.
        decode_rate: Bytes per second, after decompression, that a reader decompresses.
    """

    tensors: tuple[SavedTensor, ...]
    forward: float
    backward: float
    write_rate: float
    read_rate: float
    encode_rate: float = inf
    decode_rate: float = inf

    def __post_init__(self) -> None:
        rates = (self.write_rate, self.read_rate, self.encode_rate, self.decode_rate)
        if not all(rate > 0 for rate in rates):
            raise ConfigError(f"rates are {rates} bytes per second; each must be above 0. Profile a step again")

    def pays(self, index: int) -> bool:
        """Return whether a tensor is written and read in less time if it is compressed."""
        ratio = self.tensors[index].ratio
        writes = ratio / self.write_rate + 1 / self.encode_rate < 1 / self.write_rate
        return writes and ratio / self.read_rate + 1 / self.decode_rate < 1 / self.read_rate


@dataclass(frozen=True)
class Outcome:
    """A step as it is predicted.

    Attributes:
        wait: Seconds that it is longer than without a transfer.
        peak: Most bytes of saved tensors in memory at a time.
    """

    wait: float
    peak: int


def in_flight_limit(budget: int) -> int:
    """Bytes that may be in flight; one tensor alone may be larger."""
    return budget // IN_FLIGHT


def room(budget: int) -> int:
    """Bytes that may stay in memory for the whole step, if anything is written."""
    return budget - in_flight_limit(budget)


def simulate(profile: StepProfile, budget: int, offloaded: Collection[int], compressed: Collection[int]) -> Outcome:
    """Predict a step that writes these tensors in the order of the forward, and reads them in that of the backward."""
    step = _Step(profile, budget, frozenset(offloaded), frozenset(compressed))
    step.go_forward()
    step.go_backward()
    return Outcome(step.late, step.peak)


@dataclass
class _Step:
    profile: StepProfile
    budget: int
    offloaded: frozenset[int]
    compressed: frozenset[int]
    late: float = 0.0
    """Seconds by which everything that follows is later than in the profile."""
    disk: float = 0.0
    """Seconds from the begin of the step until the last transfer so far ends."""
    held: int = 0
    peak: int = 0
    writing: deque[tuple[float, int]] = field(default_factory=deque)
    """End and index of each write that has not ended."""

    def go_forward(self) -> None:
        """Write one after another; a tensor waits to be written while too much is in flight."""
        tensors, limit, flight = self.profile.tensors, in_flight_limit(self.budget), 0
        for index, tensor in enumerate(tensors):
            now = tensor.packed + self.late
            flight -= self._written(now)
            self._hold(tensor.size)
            if index in self.offloaded:
                while self.writing and flight + tensor.size > limit:
                    self.late += max(0.0, self.writing[0][0] - now)
                    now = max(now, self.writing[0][0])
                    flight -= self._written(now)
                self.disk = max(self.disk, now) + self._seconds(index, writes=True)
                self.writing.append((self.disk, index))
                flight += tensor.size
        self._written(self.profile.forward + self.late)

    def go_backward(self) -> None:
        """Read in the order of need, as early as memory is free; tensors still being written are taken from memory."""
        tensors, begin = self.profile.tensors, self.profile.forward + self.late
        taken = {index for _, index in self.writing}
        reads = self.offloaded - taken
        order = sorted(range(len(tensors)), key=lambda index: (tensors[index].needed, index))
        freed: deque[tuple[float, int]] = deque()
        in_use, since = 0, 0.0
        for index in order:
            tensor = tensors[index]
            when = self.profile.forward + tensor.needed + self.late
            if tensor.needed > since:
                # A node has done with its tensors when the next one asks for its own.
                freed.append((when, in_use))
                in_use, since = 0, tensor.needed
            if index in reads:
                arrival = self._read(index, max(begin, self.disk), freed)
                self.late += max(0.0, arrival - when)
            in_use += tensor.size

    def _read(self, index: int, start: float, freed: deque[tuple[float, int]]) -> float:
        """The time at which a tensor is there, if its read may start at this one."""
        size = self.profile.tensors[index].size
        # Memory is freed in the order of use, so the next to be freed is known.
        while freed and (freed[0][0] <= start or self.held + size > self.budget):
            at, bytes_freed = freed.popleft()
            start = max(start, at)
            self.held -= bytes_freed
        self._hold(size)
        self.disk = start + self._seconds(index, writes=False)
        return self.disk

    def _hold(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)

    def _written(self, now: float) -> int:
        """Free tensors that have been written by now; return their bytes."""
        freed = 0
        while self.writing and self.writing[0][0] <= now:
            freed += self.profile.tensors[self.writing.popleft()[1]].size
        self.held -= freed
        return freed

    def _seconds(self, index: int, *, writes: bool) -> float:
        tensor, profile = self.profile.tensors[index], self.profile
        rate, codec = (profile.write_rate, profile.encode_rate) if writes else (profile.read_rate, profile.decode_rate)
        if index not in self.compressed:
            return tensor.size / rate
        return tensor.size * tensor.ratio / rate + tensor.size / codec
