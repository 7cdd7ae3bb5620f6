"""Copies from the memory of accelerators into images, at once or overlapped with training."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing

import torch

from fastckpt._core.transfer.device_copy import CopyPiece, DeviceCopy, Lane, copy_at_once, lane
from fastckpt._core.transfer.device_memory import room
from fastckpt._core.transfer.host_copy import Copy

Sample = Callable[[Sequence[Copy]], Sequence[CopyPiece]]
"""Takes samples of the storages to copy from one device; raises torch.OutOfMemoryError."""


class DeviceStreams:
    """The streams that copy from each device of this process."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, Lane | None] = {}
        self._trained = defaultdict[torch.device, set[torch.Stream]](set)

    def copy(self, copies: Sequence[Copy]) -> list[Copy]:
        """Do the copies from device memory, until every byte has arrived; returns the others, which are left to do."""
        host, device = by_place(copies)
        for each, part in _by_device(device).items():
            if (own := self._lane(each)) is None:
                copy_at_once(part)
                continue
            with closing(DeviceCopy(own, part)) as transfer:
                transfer.begin()
                transfer.finish()
        return host

    def trains(self) -> None:
        """Note that an optimizer steps in the streams that are current for this thread."""
        for device, own in self._lanes.items():
            if own is not None:
                self._trained[device].add(torch.accelerator.current_stream(device))

    def begin(self, deferred: Sequence[Copy], to_stage: Sequence[Copy], sample: Sample) -> list[DeviceCopy]:
        """Copies to run in the background: training may change ``to_stage`` now, ``deferred`` after `DeviceCopy.hold`.

        Samples of ``deferred`` are taken by the current stream, and sent after all others.

        Tensors that a device has no room to stage are copied at once, and so are all of a device without a lane. Where
        optimizers step in another stream than the current one, staging is done when this returns.
        """
        later, now = _by_device(deferred), _by_device(to_stage)
        transfers = []
        for device in {**later, **now}:
            if (own := self._lane(device)) is None:
                copy_at_once([*later[device], *now[device]])
            else:
                transfers.append(self._begin(own, later[device], now[device], sample))
        return transfers

    def _begin(self, lane: Lane, deferred: list[Copy], to_stage: list[Copy], sample: Sample) -> DeviceCopy:
        try:
            # In the training stream, before it goes on: whatever training writes later comes later in that stream.
            samples = sample(deferred)
        except torch.OutOfMemoryError:
            # No room for a few samples: a copy in the background could not be checked, so nothing is deferred.
            self.copy([*deferred, *to_stage])
            deferred, to_stage, samples = [], [], ()
        # Staging must not take memory that training needs at its peak: that would end the job, not the save.
        if to_stage and sum(size for _, _, size in to_stage) > room(lane.device):
            self.copy(to_stage)
            to_stage = []
        try:
            transfer = DeviceCopy(lane, deferred, to_stage, samples)
        except torch.OutOfMemoryError:
            self.copy(to_stage)
            # The estimate of free memory was too high, as by fragmentation: copied at once instead.
            transfer = DeviceCopy(lane, deferred, (), samples)
        # Staging is ordered before later work of the current stream alone, not of another one that an optimizer uses.
        trained = self._trained.pop(lane.device, set())
        if trained - {torch.accelerator.current_stream(lane.device)}:
            transfer.wait_until_staged()
        return transfer

    def _lane(self, device: torch.device) -> Lane | None:
        if device not in self._lanes:
            self._lanes[device] = lane(device)
        return self._lanes[device]


def by_place(copies: Sequence[Copy]) -> tuple[list[Copy], list[Copy]]:
    """Copies from host memory, and those from device memory."""
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
