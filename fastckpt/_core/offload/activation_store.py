"""The memory that saved activations may take, and their moves to the scratch file and back, by threads."""

import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from fastckpt._core import metrics
from fastckpt._core.byte_sizes import binary
from fastckpt._core.heap import compute_alone
from fastckpt._core.offload.forward_pass import ForwardPass, Occurrence
from fastckpt._core.offload.offload_log import REMEDY
from fastckpt._core.offload.packed_tensor import PackedTensor
from fastckpt._core.offload.resident_memory import ResidentMemory
from fastckpt._core.offload.saved_storage import Place, SavedStorage
from fastckpt._core.offload.scratch_file import ScratchFile
from fastckpt._core.offload.stored_forms import StoredForms
from fastckpt._core.offload.transfers import Transfers
from fastckpt._core.policy.offload_step import in_flight_limit
from fastckpt.errors import OffloadError

logger = logging.getLogger("fastckpt")

THREADS = 2
"""Threads that write, and as many that read: each has one transfer under way."""
STALLED = 300.0
"""Seconds without an answer after which a disk counts as failed."""


class ActivationStore:
    """Saved activations within a budget of memory, and those that are in a file instead.

    All changes of places and counts happen under one lock, and no transfer does. Storages die in any thread, also
    within the lock: their death is noted, and counted later.

    Args:
        file: Scratch file for the bytes.
        budget: Bytes that may be in memory; a quarter of it may be on the way out.
        half: True if floats of 32 bits are stored in 16.
        on_end: Called with the reason when nothing is written any more, in any thread and under the lock.
    """

    def __init__(
        self, file: ScratchFile, budget: int, *, half: bool = False, on_end: Callable[[str], None] = lambda _: None
    ) -> None:
        self.file = file
        self.memory = ResidentMemory(budget)
        self.transfers = Transfers(file)
        # An exception of a signal's handler may come between any two lines: a storage is here, or it is not.
        self._leaving: dict[weakref.ref[SavedStorage], int] = {}
        self.failure = ""
        """Reason why writing has stopped; empty while it goes on."""
        self._forms = StoredForms(self.transfers, half=half)
        self._on_end = on_end
        self._moved = threading.Condition()
        # Their threads end when this object does: executors hold none of their own methods.
        self._writers = ThreadPoolExecutor(THREADS, "fastckpt-offload-write", compute_alone)
        self._readers = ThreadPoolExecutor(THREADS, "fastckpt-offload-read", compute_alone)

    @property
    def in_flight(self) -> int:
        """Bytes in memory that are on the way out."""
        return sum(self._leaving.copy().values())

    @property
    def resident(self) -> int:
        """Bytes in memory that are kept, on the way out, or fetched."""
        with self._moved:
            return self.memory.resident

    # --- the way out

    def keep(self, saved: SavedStorage) -> bool:
        """Have a storage stay in memory until the graph drops it; returns whether there is room.

        There is, unless other forwards than the planned one have left their activations, too.
        """
        with self._moved:
            if not self.memory.fits(saved.size):
                return False
            self.memory.count(saved)
            return True

    def write(self, saved: SavedStorage, at: Occurrence, *, compressed: bool, sampled: bool) -> None:
        """Begin to write a storage, once there is room on the way out; it stays in memory if that fails.

        Args:
            saved: Storage to write.
            at: Its position in its forward.
            compressed: Whether to encode it.
            sampled: Whether to measure the gain of encoding it.
        """
        # The queue must not keep alive storages that a dropped graph has given up.
        ref, how = weakref.ref(saved), (compressed, sampled)
        try:
            with self._moved:
                self.memory.make_room(saved.size, ahead=True)
                self._wait_for_room(saved.size, at.forward)
                self.memory.count(saved)
                if self.failure or not self._place(saved, compressed):
                    return
                saved.place = Place.WAITING
                self._leaving[ref] = saved.size
            if not _submit(self._writers, self._write, ref, saved.size, at, how):
                self._arrive(ref)
        except BaseException:  # of a signal's handler: this forward ends here, and others go on
            self._leaving.pop(ref, None)
            raise

    def _place(self, saved: SavedStorage, compressed: bool) -> bool:
        try:
            saved.region = self.file.take(self._forms.room(saved, compressed=compressed))
            self.file.free_with(saved, saved.region)
        except OSError as error:
            self._end(error)
        return saved.region is not None

    def _wait_for_room(self, size: int, forward: ForwardPass) -> None:
        if not self._is_crowded(size):
            return
        start = time.perf_counter()
        with metrics.phase("offload.wait_for_writes"):
            if not self._moved.wait_for(lambda: not self._is_crowded(size), STALLED):
                self._end(TimeoutError(f"no write was completed in {STALLED:.0f} s"))
        forward.pack_wait += time.perf_counter() - start

    def _is_crowded(self, size: int) -> bool:
        if self.failure or not self.in_flight:
            return False
        return self.in_flight + size > in_flight_limit(self.memory.budget) or not self.memory.fits(size)

    def _write(self, ref: "weakref.ref[SavedStorage]", size: int, at: Occurrence, how: tuple[bool, bool]) -> None:
        saved = ref()
        stored = False
        try:
            if saved is not None and self._begin(saved, at.forward):
                with metrics.phase("offload.write", bytes=size):
                    stored = self._forms.write(saved, at, *how)
        except (OSError, RuntimeError) as error:
            with self._moved:
                # Memory that was freed meanwhile, as a gathered weight's may be, is no failure of the disk.
                if saved is None or saved.is_whole:
                    self._end(error)
        finally:
            memory = self._arrive(ref, stored=stored, needed=at.forward.was_needed)
        del memory  # outside of the lock: unmapping it takes a while

    def _begin(self, saved: SavedStorage, forward: ForwardPass) -> bool:
        with self._moved:
            if saved.place is not Place.WAITING:
                return False
            # Its backward has begun and will need it soon: then it need not go.
            near = forward.was_needed and self.memory.fits(0)
            if self.failure or near or not saved.is_whole:
                saved.place = Place.RESIDENT
                return False
            saved.place = Place.WRITING
            return True

    def _arrive(
        self, ref: "weakref.ref[SavedStorage]", *, stored: bool = False, needed: bool = False
    ) -> torch.Tensor | None:
        """Take a storage off the way out; returns memory that is not needed any more."""
        saved = ref()
        with self._moved:
            self._leaving.pop(ref, None)
            self._moved.notify_all()
            if saved is None:
                return None
            if not stored:
                saved.place = Place.RESIDENT
                return None
            if needed and self.memory.fits(0):
                saved.place = Place.FETCHED  # it is needed soon
                self.memory.read_ahead(saved)
                return None
            return self.memory.drop(saved)

    # --- the way back

    def unpack(self, packed: PackedTensor) -> torch.Tensor:
        """The tensor, from memory or the file.

        Raises:
            RuntimeError: It was changed in place since it was packed.
            OffloadError: It cannot be read.
        """
        packed.check()
        saved, forward = packed.saved, packed.at.forward
        forward.needs(packed.at.index)
        while True:
            with self._moved:
                claimed = self._claim(saved, Place.STORED, Place.REQUESTED)
                if claimed and not (saved.resident and saved.resident.counted):
                    self._make_room(saved, forward)
                self._fetch_ahead(forward)
                if not claimed and self._waited_for(saved, forward):
                    return self._hand(packed)
            if claimed:
                self._read_now(saved, forward)

    def _claim(self, saved: SavedStorage, *places: Place) -> bool:
        """Make it this thread's to read a storage that is in one of these places."""
        if saved.place not in places:
            return False
        saved.place = Place.READING
        return True

    def _make_room(self, saved: SavedStorage, forward: ForwardPass) -> None:
        """Count a needed storage; it is read even if there is no room, once nothing is on the way out any more."""
        if not self.memory.make_room(saved.size, ahead=True) and self.in_flight:
            start = time.perf_counter()
            with metrics.phase("offload.wait_for_writes"):
                self._moved.wait_for(lambda: not self.in_flight or self.memory.fits(saved.size), STALLED)
            forward.fetch_wait += time.perf_counter() - start
        self.memory.count(saved)

    def _fetch_ahead(self, forward: ForwardPass) -> None:
        """Request the next needed storages, in that order, as far as the budget has room."""
        while (entry := forward.peek()) is not None:
            saved = entry.saved()
            if saved is not None and saved.place is Place.STORED:
                if not self.memory.make_room(saved.size):
                    return
                saved.place = Place.REQUESTED
                self.memory.read_ahead(saved)
                self.memory.count(saved)
                if not _submit(self._readers, self._read_ahead, weakref.ref(saved)):
                    saved.place = Place.STORED
                    self.memory.discount(saved)
            forward.skip()

    def _read_ahead(self, ref: "weakref.ref[SavedStorage]") -> None:
        saved = ref()
        if saved is None:
            return
        with self._moved:
            if not self._claim(saved, Place.REQUESTED):
                return
        try:
            self._read(saved)
        except (OSError, RuntimeError) as error:
            # Who needs it tries once more, and raises the error of that.
            logger.debug("offloaded activations could not be read ahead: %s", error)

    def _read_now(self, saved: SavedStorage, forward: ForwardPass) -> None:
        start = time.perf_counter()
        try:
            self._read(saved)
        except OSError as error:
            raise OffloadError(
                f"cannot read back {binary(saved.size)} of activations from {self.file.directory}: "
                f"{error.strerror or error}; this step cannot be completed. Check the disk, or choose another "
                "directory, and resume from the last checkpoint"
            ) from error
        finally:
            forward.fetch_wait += time.perf_counter() - start

    def _waited_for(self, saved: SavedStorage, forward: ForwardPass) -> bool:
        """Wait for a thread that reads; returns whether the bytes are in memory."""
        if saved.place is Place.READING:
            start = time.perf_counter()
            with metrics.phase("offload.wait_for_reads"):
                if not self._moved.wait_for(lambda: saved.place is not Place.READING, STALLED):
                    raise OffloadError(
                        f"{binary(saved.size)} of activations were not read from {self.file.directory} in "
                        f"{STALLED:.0f} s; this step cannot be completed. Check the disk, and resume from the last "
                        "checkpoint"
                    )
            forward.fetch_wait += time.perf_counter() - start
        return saved.memory is not None

    def _read(self, saved: SavedStorage) -> None:
        memory = None
        try:
            with metrics.phase("offload.read", bytes=saved.size):
                memory = self._forms.load(saved)
        finally:
            with self._moved:
                saved.memory = memory
                saved.place = Place.STORED if memory is None else Place.FETCHED
                if memory is None:
                    self.memory.discount(saved)
                self._moved.notify_all()

    def _hand(self, packed: PackedTensor) -> torch.Tensor:
        saved, tensor = packed.saved, packed.tensor()
        if saved.place is Place.WAITING:
            saved.place = Place.RESIDENT  # the writer passes it over
        elif saved.place is Place.FETCHED:
            self.transfers.use(tensor)
            saved.handed += 1
            self.memory.use(saved)
            if saved.handed >= saved.packs:
                self.memory.drop(saved)
        return tensor

    # --- the end

    def _end(self, error: Exception) -> None:
        """Write nothing any more: training goes on with tensors in memory."""
        if self.failure:
            return
        reason = getattr(error, "strerror", None) or str(error)
        self.failure = f"{self.file.directory}: {reason}"
        logger.warning("%s", _explained(self.file, reason))
        self._on_end(reason)
        self._moved.notify_all()


def _explained(file: ScratchFile, reason: str) -> str:
    return (
        f"activations are not offloaded any more: {file.directory}: {reason}, with {binary(file.used)} of them in the "
        f"file there. Training goes on with all further ones in memory. {REMEDY}"
    )


def _submit(pool: ThreadPoolExecutor, work: Callable[..., Any], *arguments: Any) -> bool:
    """Returns False when the interpreter is about to end, and threads take no more work."""
    try:
        pool.submit(work, *arguments)
    except RuntimeError:
        return False
    return True
