"""Copies from accelerators into images, at once or in the background, so that training stalls least."""

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import closing

import torch

from fastckpt._core.policy.device_staging import pays
from fastckpt._core.transfer.device_copy import CopyPiece, DeviceCopy, Lane, copy_at_once, lane
from fastckpt._core.transfer.device_memory import room, squeezes
from fastckpt._core.transfer.host_copy import Copy

logger = logging.getLogger("fastckpt")

LATELY = 8
"""Snapshots of each kind whose stalls count."""


Sample = Callable[[Sequence[Copy]], Sequence[CopyPiece]]
"""Takes samples of what is to be copied from one device; raises torch.OutOfMemoryError."""


class _Way:
    """One device's lane, and what was seen of snapshots that took it: seconds of stalls, by whether they were aside.

    Attributes:
        trained: The streams in which optimizers stepped since the last snapshot.
    """

    def __init__(self, lane: Lane) -> None:
        self.device = lane.device
        self.lane = lane
        self.trained: set[torch.Stream] = set()
        self.stalls: dict[bool, deque[float]] = {aside: deque(maxlen=LATELY) for aside in (False, True)}
        self.last: tuple[DeviceCopy, bool, int] | None = None
        self.is_short = False
        self.squeezes = 0

    def learn(self) -> None:
        """Take note of what the last snapshot made training wait, and whether memory got short meanwhile."""
        if self.last is None:
            return
        transfer, aside, _ = self.last
        if (held := transfer.held) is not None:
            self.stalls[aside].append(held)
        if aside and (transfer.short or squeezes(self.device) > self.squeezes):
            logger.warning(
                "memory of %s got short: snapshots are copied to the host at once from now on, and not set aside there",
                self.device,
            )
            self.is_short = True

    def sets_aside(self, size: int) -> bool:
        """Whether to set so many bytes aside now."""
        if self.is_short or not pays(self.stalls[False], self.stalls[True]):
            return False
        unreserved, _ = room(self.device)
        return size <= unreserved + self._ours()

    def has_room(self, size: int) -> bool:
        """Whether training's own stream can have so many bytes beside what it needs at most."""
        _, spare = room(self.device)
        return size <= spare + self._ours()

    def _ours(self) -> int:
        """Bytes that were set aside last: torch keeps them for the next time, and counts them to what was needed."""
        return self.last[2] if self.last and self.last[1] else 0


class DeviceStreams:
    """The ways out of all devices of this process."""

    def __init__(self) -> None:
        self._ways: dict[torch.device, _Way | None] = {}

    def copy(self, copies: Sequence[Copy]) -> list[Copy]:
        """Do the copies from memory of devices, until every byte has arrived; the others, which are left to do."""
        host, device = by_place(copies)
        for each, part in _by_device(device).items():
            way = self._way(each)
            if way is None:
                copy_at_once(part)
                continue
            with closing(DeviceCopy(way.lane, part)) as transfer:
                transfer.begin()
                transfer.finish()
        return host

    def trains(self) -> None:
        """An optimizer steps in the streams that are current for this thread."""
        for way in self._ways.values():
            if way is not None:
                way.trained.add(torch.accelerator.current_stream(way.device))

    def begin(self, still: Sequence[Copy], moving: Sequence[Copy], sample: Sample) -> list[DeviceCopy]:
        """Copies to be run in the background, which may change ``moving`` now, and ``still`` once it was held.

        Samples of ``still`` are taken by the current stream, and sent after all others.

        Of a device that has no room to set aside what moves, that is copied at once, and so is all of one that has no
        lane. Where optimizers step in another stream than the current one, what moves is aside when this returns.
        """
        standing, changing = _by_device(still), _by_device(moving)
        transfers = []
        for device in {**standing, **changing}:
            way = self._way(device)
            if way is None:
                copy_at_once([*standing[device], *changing[device]])
            else:
                transfers.append(self._begin(way, standing[device], changing[device], sample))
        return transfers

    def _begin(self, way: _Way, still: list[Copy], moving: list[Copy], sample: Sample) -> DeviceCopy:
        way.learn()
        try:
            samples = sample(still)
        except torch.OutOfMemoryError:
            self.copy([*still, *moving])
            still, moving, samples = [], [], ()
        size, least = _size(still), _size(moving)
        if least and not way.has_room(least):
            self.copy(moving)
            moving, least = [], 0
        aside = way.sets_aside(size + least)
        way.squeezes = squeezes(way.device) if aside else 0
        try:
            transfer = DeviceCopy(way.lane, still, moving, samples, aside=aside)
        except torch.OutOfMemoryError:
            self.copy(moving)
            transfer, aside = DeviceCopy(way.lane, still, (), samples), False
        if way.trained - {torch.accelerator.current_stream(way.device)}:
            transfer.wait_until_aside()
        way.trained.clear()
        way.last = transfer, aside, size
        return transfer

    def _way(self, device: torch.device) -> _Way | None:
        if device not in self._ways:
            made = lane(device)
            self._ways[device] = None if made is None else _Way(made)
        return self._ways[device]


def _size(copies: Sequence[Copy]) -> int:
    return sum(size for _, _, size in copies)


def by_place(copies: Sequence[Copy]) -> tuple[list[Copy], list[Copy]]:
    """Copies from the processor's memory, and those from memory of devices."""
    host: list[Copy] = []
    device: list[Copy] = []
    for copy in copies:
        (host if copy[1].device.type == "cpu" else device).append(copy)
    return host, device


def _by_device(copies: Sequence[Copy]) -> defaultdict[torch.device, list[Copy]]:
    parts = defaultdict[torch.device, list[Copy]](list)
    for copy in copies:
        parts[copy[1].device].append(copy)
    return parts
