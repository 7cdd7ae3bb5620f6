"""Stager for DCP: ``dcp.async_save`` returns once its thread has copied the state into shared memory, not before."""

import threading
import time
from collections.abc import ItemsView
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from fastckpt.errors import ConfigError

START_DEADLINE = 60.0
"""Seconds that DCP may take to begin a save in its thread."""
GLANCE = 0.01
"""Seconds between two looks at whether that thread has ended without a copy."""


class Staging(dict[str, Any]):
    """The state of one save as DCP's thread gets it, and how far that thread is with it."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__(state)
        # At the call, in training's thread: DCP's thread has another current stream, which knows nothing of this work.
        self._written = _all_launched()
        self._copied = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Note that the current thread saves it with our writer, unless another does, or it is over."""
        if not self._copied.is_set():
            self._thread = self._thread or threading.current_thread()

    def settle(self) -> None:
        """Return when a device has done its writes to it from before it was staged.

        The current thread's copies come after kernels of its own current stream alone.
        """
        if self._written is not None:
            self._written.synchronize()

    @property
    def is_ours(self) -> bool:
        """True if the current thread saves it."""
        return self._thread is threading.current_thread()

    def end(self) -> None:
        """Report that it is not read any more."""
        # Drops the references, so that the state's memory is not kept until the next save.
        self.clear()
        self._copied.set()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]  # its name is private to CPython
        """The entries; raises ConfigError in a save with another writer, which would read them while they change."""
        # Only our writer calls `begin`: another one that reads the entries would read them while training changes them.
        if self._thread is None or self._copied.is_set():
            self.end()
            raise ConfigError(
                "a SharedMemoryStager makes no copy but that of its writer: give dcp.async_save the same "
                "SharedMemoryWriter as storage_writer, with a checkpoint_id, and async_checkpointer_type=THREAD"
            )
        return super().items()

    def wait(self) -> None:
        """Return when nothing is read of it any more: it was copied, or is not saved, as the future reports."""
        end = time.monotonic() + START_DEADLINE
        # Polls, because the thread that saves may end by an exception without a call of `end`.
        while not self._copied.wait(GLANCE):
            if self._thread is None and time.monotonic() > end:
                self.end()  # a save that begins later fails
                raise TimeoutError(f"dcp.async_save has not begun to save within {START_DEADLINE:g} s")
            if self._thread is not None and not self._thread.is_alive():
                self.end()

    def join(self) -> None:
        """Return when the save is over, unless it is that of the current thread."""
        if self._thread is not None and not self.is_ours:
            self._thread.join()


class Stages(Protocol):
    """A writer that reports the progress of its saves."""

    staging: Staging | None


class SharedMemoryStager(AsyncStager):
    """Lets ``dcp.async_save`` use a `SharedMemoryWriter` with one copy, that into shared memory.

    ``async_save`` returns when a thread has copied the state, which may then be changed; the thread commits. The next
    save waits for it.

    Args:
        writer: The ``storage_writer`` of each ``async_save`` with this as ``async_stager``.
    """

    def __init__(self, writer: Stages) -> None:
        self._writer = writer
        self._staging = Staging({})

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The same state, once the save before has ended."""
        self._staging.join()  # one save at a time: all use the same writer
        self._writer.staging = self._staging = Staging(state_dict)
        return self._staging

    def synchronize_staging(self) -> None:
        """Return when the state may be changed; ``async_save`` calls it.

        Raises:
            TimeoutError: DCP has begun no save.
        """
        self._staging.wait()

    def close(self) -> None:
        """Wait until the last save has ended."""
        self._staging.join()


def _all_launched() -> torch.Event | None:
    """An event after all work launched in this thread's current stream of a device; None without a device."""
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.get_device_module(device).is_initialized():
        return None
    return torch.accelerator.current_stream().record_event()
