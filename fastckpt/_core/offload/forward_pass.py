"""The record of one forward: its saved tensors, their order and times, and when its backward needed each."""

import time
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import inf

from fastckpt._core.offload.saved_storage import SavedStorage
from fastckpt._core.offload.stream_times import StreamTimes
from fastckpt._core.policy.offload_plan import SavedTensor, StepProfile

JITTER = 16
"""Slots by which a backward may go back in the expected order without being taken for another one."""


@dataclass(slots=True)
class PassEntry:
    """One of the storages that a forward saved.

    Attributes:
        saved: The storage, as long as the graph needs it.
        node: The number of the first node that saved it; later nodes have greater ones.
        packed: Seconds after the forward began, without waits of ours.
        needed: Seconds after the backward began, without waits of ours; None: not needed yet.
        ratio: Size of a compressed sample to that of the sample; 1.0 if that was not measured.
    """

    saved: "weakref.ref[SavedStorage]"
    size: int
    node: int
    packed: float
    needed: float | None = None
    ratio: float = 1.0


class ForwardPass:
    """Record of one forward and its backward.

    Args:
        order: The order in which the backward is expected to need the entries; None: the reverse one of their nodes.
    """

    def __init__(self, order: Sequence[int] | None = None) -> None:
        self.entries: list[PassEntry] = []
        self.order = order
        """The order that a profile gives; None once this pass turned out to be another one."""
        self.forward = 0.0
        self.pack_wait = 0.0
        self.fetch_wait = 0.0
        self.moved = 0
        """Bytes that were taken to the file."""
        self.written = 0
        """Bytes that this took in the file."""
        self.times: StreamTimes | None = None
        """Times by the stream of the GPU that has all saved tensors; None: the host's clock is used."""
        self.codec_rates = inf, inf
        """Bytes per second that a thread encodes and decodes, of the tensors that take longest."""
        self._ended = False
        self._began = time.perf_counter()
        self._backward_began = 0.0
        self._last_unpack = 0.0
        self._indices: dict[int, int] = {}
        self._sequence: list[int] = []
        self._positions: list[int] = []
        self._next = 0
        self._last = 0

    def elapsed(self) -> float:
        """Seconds since the forward began, without waits of ours."""
        return time.perf_counter() - self._began - self.pack_wait

    def index_of(self, saved: SavedStorage) -> int | None:
        """The entry of a storage that this pass has saved already."""
        index = self._indices.get(id(saved))
        # An id may be that of an earlier object, which has died.
        return index if index is not None and self.entries[index].saved() is saved else None

    def add(self, saved: SavedStorage, node: int) -> int:
        """Record that a storage is saved; returns its entry."""
        index = self._indices[id(saved)] = len(self.entries)
        self.entries.append(PassEntry(weakref.ref(saved), saved.size, node, self.elapsed()))
        if self.times is None and saved.device.type == "cuda" and index == 0:
            self.times = StreamTimes(saved.device)
        if self.times is not None:
            self.times = self.times if saved.device == self.times.device else None
            self._note(("packed", index))
        return index

    def end_forward(self) -> None:
        """Record that the forward is over."""
        self.forward = self.elapsed()
        self._note("forward")
        self._ended = True

    def needs(self, index: int) -> None:
        """Record that the backward needs a entry now."""
        now = time.perf_counter()
        self._backward_began = self._backward_began or now
        self._last_unpack = now
        entry = self.entries[index]
        if entry.needed is None:
            entry.needed = now - self._backward_began - self.fetch_wait
            self._note(("needed", index))
        self._note("backward")
        self._turn_to(index)

    @property
    def is_over(self) -> bool:
        """True if this forward saved nothing that the backward has yet to need for the first time."""
        return self._ended and all(each.needed is not None or each.saved() is None for each in self.entries)

    @property
    def was_needed(self) -> bool:
        """True if a backward has begun."""
        return self._backward_began > 0

    @property
    def wait(self) -> float:
        """Seconds by which this step was longer: those for which a GPU, or else the host, waited."""
        return self.pack_wait + self.fetch_wait if self.times is None else self.times.idle()

    def profile(self, write_rate: float, read_rate: float) -> StepProfile:
        """The times of this pass; tensors that were not needed count as needed at the end."""
        if self.times is None:
            packed = [each.packed for each in self.entries]
            needed = [each.needed for each in self.entries]
            forward, backward = self.forward, self._last_unpack - self._backward_began - self.fetch_wait
        else:
            packed, needed, forward, backward = self._of_stream(self.times.seconds())
        tensors = tuple(
            SavedTensor(each.size, packed_at, backward if needed_at is None else needed_at, each.ratio)
            for each, packed_at, needed_at in zip(self.entries, packed, needed, strict=True)
        )
        return StepProfile(tensors, forward, backward, write_rate, read_rate, *self.codec_rates)

    def _of_stream(self, at: dict[Hashable, float]) -> tuple[list[float], list[float | None], float, float]:
        """Return the times at which tensors were packed and needed, and the durations of forward and backward.

        They follow from the marks in a stream.
        """
        indices = range(len(self.entries))
        began = min((at[("needed", each)] for each in indices if ("needed", each) in at), default=0.0)
        needed = [at[("needed", each)] - began if ("needed", each) in at else None for each in indices]
        return [at[("packed", each)] for each in indices], needed, at["forward"], at.get("backward", began) - began

    def _note(self, what: Hashable) -> None:
        if self.times is not None:
            self.times.note(what)

    def order_of_needs(self) -> tuple[int, ...]:
        """The entries in the order in which the backward needed them first."""
        needed = [(each.needed, index) for index, each in enumerate(self.entries) if each.needed is not None]
        return tuple(index for _, index in sorted(needed))

    def _turn_to(self, index: int) -> None:
        if len(self._positions) != len(self.entries):
            self._arrange()
        position = self._positions[index]
        if position < 0:
            return  # the backward did not need it when it was profiled
        # Back to a much earlier one: a second backward through the same graph has begun.
        self._next = position + 1 if position + JITTER < self._last else max(self._next, position + 1)
        self._last = position

    def _arrange(self) -> None:
        """Put the entries into the order in which they are expected to be needed."""
        # autograd runs the nodes of the greatest numbers first; a node unpacks its tensors in the order of saving.
        by_node = sorted(range(len(self.entries)), key=lambda each: (-self.entries[each].node, each))
        self._sequence = by_node if self.order is None else [each for each in self.order if each < len(self.entries)]
        self._positions = [-1] * len(self.entries)
        for position, each in enumerate(self._sequence):
            self._positions[each] = position

    def peek(self) -> PassEntry | None:
        """The next entry that was not looked at yet."""
        return self.entries[self._sequence[self._next]] if self._next < len(self._sequence) else None

    def skip(self) -> None:
        """Go on to the entry after it."""
        self._next += 1


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A saved storage in a forward: where it is in the order of that."""

    forward: ForwardPass = field(repr=False)
    index: int
