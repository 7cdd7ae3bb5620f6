"""A writer's side of a save: plan, ask for a slot, fill its images, commit, notify."""

import gc
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastckpt._core import metrics
from fastckpt._core.client.connection import SaverClient
from fastckpt._core.client.departures import Departures
from fastckpt._core.client.save_results import TO_MEMORY, SaveRequest
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.plan import Plan
from fastckpt._core.ipc.messages import Granted, Skipped
from fastckpt._core.memory import loans, slots
from fastckpt._core.snapshot.background_copy import SaveOutcome
from fastckpt._core.snapshot.file_plans import FilePlans
from fastckpt._core.snapshot.overlap import Overlap
from fastckpt._core.transfer.device_streams import DeviceStreams
from fastckpt._core.transfer.host_copy import HostCopy
from fastckpt._core.transfer.image import Image, ImageCache, removed
from fastckpt.errors import AgentLost, ArenaInUse, ArenaTooSmall, ProtocolError, SaverError

logger = logging.getLogger("fastckpt")

TROUBLE = (AgentLost, ProtocolError, SaverError)
"""Errors of the saver, not of the save."""
PREFAULT_DEADLINE = 600.0
"""Seconds to wait for a slot to be made ready."""


class Snapshotter:
    """Takes snapshots of this writer's states; one state is one image.

    While ``overlap`` finishes a save in the background, nothing else here may be called: see `Overlap.wait`.
    """

    def __init__(
        self,
        link: SaverClient,
        threads: int,
        streams: DeviceStreams,
        overlap: Overlap,
        departures: Departures | None,
        *,
        weights_only: bool,
    ) -> None:
        self._link = link
        self._departures = departures
        self._streams = streams
        self._overlap = overlap
        self._plans = FilePlans(weights_only=weights_only)
        self._images = ImageCache()
        self._last: tuple[Path, slots.SlotDone] | None = None
        self._begun: tuple[SaveId, dict[str, Image]] | None = None
        self._outgrown = False
        self._filler = HostCopy(threads)
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()

    def prepare(self, states: Mapping[str, Any]) -> None:
        """Have memory reserved and mapped for states like these, in the background; raises ArenaTooSmall."""
        self.expect(self._plan(states)[1])

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Have memory reserved and mapped for images of these sizes in bytes, as `prepare`; raises ArenaTooSmall."""
        self._plans.keep(sizes)
        self._link.reserve(self._plans.sizes)
        names = tuple(sizes)
        # A daemon: it maps files ahead of time only, and must not keep a job alive that ends before its first save.
        thread = threading.Thread(target=self._prefault, args=(names,), name="fastckpt-prefault", daemon=True)
        thread.start()
        self._threads.append(thread)

    def save(
        self,
        save: SaveId,
        states: Mapping[str, Any],
        *,
        request: SaveRequest = TO_MEMORY,
        details: dict[str, Any] | None = None,
        commit: bool = True,
    ) -> SaveOutcome:
        """Copy the states into a slot. Once this returns they may be changed, except deferred tensors: see `Overlap`.

        A state becomes a file of torch.save; `Tensors` one of safetensors, `Raw` one of bytes, and a `Plan` the file
        that was planned elsewhere. Without ``commit`` another call adds to the same save.

        The save is skipped if the saver is gone or in trouble, and if the state has outgrown memory since the first
        save, or others have taken that memory: this is no reason to end training.

        Raises:
            NotLoadable, ArenaTooSmall: The save cannot be made; the checkpoints before it stay.
        """
        # 1. plan the files while the saver chooses a slot   2. skip the save, if it has none
        # 3. copy, commit and notify: _fill
        step = save.step
        try:
            with _no_garbage_collection(), metrics.phase("snapshot.skeleton", step=step):
                plans, sizes, answer = self._plan_and_begin(save, states)
        except TROUBLE as error:
            logger.warning("step %d was not saved: %s", step, error)
            return self._skip(save, str(error), trouble=str(error))
        except ArenaTooSmall as error:
            if self._last is None:  # the first save: the job cannot be saved at all, which the user must learn
                raise
            if not self._outgrown:
                logger.warning("saves are skipped from step %d on: %s", step, error)
            self._outgrown = True
            return self._skip(save, str(error))
        if isinstance(answer, Skipped):
            return SaveOutcome(answer.reason, answer.trouble)
        self._plans.keep(sizes)
        outcome = self._fill(
            Path(answer.slot), plans, slots.SlotDone(save, {}, details or {}), request if commit else None
        )
        return replace(outcome, trouble=outcome.trouble or answer.trouble)

    def _fill(
        self, slot: Path, plans: dict[str, Plan], done: slots.SlotDone, request: SaveRequest | None
    ) -> SaveOutcome:
        """Copy; then commit, unless ``request`` is None."""
        # 1. map the images and write the skeletons   2. copy tensors that cannot wait   3. hand the rest to the
        # background thread, which commits it   4. or commit and notify the saver
        try:
            self._link.presence.renew()  # the arena may have been removed and made again
            with _no_garbage_collection(), metrics.phase("snapshot.fill", step=done.id.step):
                images, copies = self._images.install(slot, plans)
                mutations, now, later = self._overlap.part(plans.values(), copies)
                self._filler.fill(self._streams.copy(now) if self._images.device else now)
        except (OSError, ArenaInUse) as error:
            return self._skip(done.id, f"{slot} cannot be written to: {error}")
        if self._begun is not None and self._begun[0] == done.id:
            images = self._begun[1] | images  # the commit names the files of all calls of this save
        if request is None:
            self._begun = done.id, images
            return SaveOutcome("", "")
        done = replace(done, files={name: image.size for name, image in images.items()})
        finish = partial(self._finish, slot, done, list(images.values()), request)
        if mutations is not None and later:
            self._overlap.begin(done.id, mutations, later, partial(finish, "overlap"))
            return SaveOutcome("", "", pending=True)
        outcome = finish("snapshot")
        if mutations is not None and not outcome.skipped:
            self._overlap.watch(done.id, mutations)
        return outcome

    def _finish(
        self, slot: Path, done: slots.SlotDone, images: Sequence[Image], request: SaveRequest, stage: str
    ) -> SaveOutcome:
        """Commit and notify the saver, when all is copied; ``stage`` begins the names of the phases."""
        try:
            with metrics.phase(f"{stage}.commit", step=done.id.step):
                if lost := removed(images):
                    raise FileNotFoundError(f"{lost[0]} was removed")
                self._commit(slot, done)
        except OSError as error:
            return self._skip(done.id, f"{slot} cannot be written to: {error}")
        metrics.event("saved", step=done.id.step, rank=self._link.place.rank)
        return SaveOutcome("", self.notify(done.id, request, stage=stage))

    def _skip(self, save: SaveId, reason: str, trouble: str = "") -> SaveOutcome:
        """Leave out this rank's part of a save that other ranks may have made theirs of."""
        self._link.uncommitted(save, reason)
        return SaveOutcome(reason, trouble)

    def _commit(self, slot: Path, done: slots.SlotDone) -> None:
        slots.commit(slot, self._link.place.local_rank, done)
        self._last, self._outgrown = (slot, done), False

    def lend(self, save: SaveId | None, states: Mapping[str, Any]) -> dict[str, int]:
        """Leave files in the arena that later saves of others take as this writer's part; returns sizes in bytes.

        Args:
            save: The last that was begun: if its files are in memory, these are lent.
            states: The states as of that save, lent as files of ``torch.save`` otherwise.

        Raises:
            OSError: Memory is full.
            NotLoadable: It would save, but not load.
        """
        sizes = {}
        for name, state in states.items():
            path = loans.place_of(self._link.arena, name)
            slot, done = self._last or (None, None)
            is_saved = slot and done and done.id == save and name in done.files
            if not (is_saved and loans.copy_into(path, slot / name, done.files[name])):  # type: ignore[operator, union-attr]
                self._plans.plan({name: state})  # raises NotLoadable, as a save would
                torch.save(state, path)
            sizes[name] = path.stat().st_size
        return sizes

    def refusal(self, save: SaveId) -> str:
        """The saver's reason to skip a save to which this writer has nothing to give; empty if it does not skip it."""
        try:
            self._begin(save)
            answer = self._link.slot()
        except TROUBLE as error:
            return str(error)
        return answer.reason if isinstance(answer, Skipped) else ""

    def add_details(self, details: dict[str, Any]) -> None:
        """Add details to the checkpoint that was saved last, as long as it is not persisted; raises OSError."""
        if self._last is None:
            return
        slot, done = self._last
        # The record is rewritten as a whole and renamed; a reader sees the old details or the new ones.
        if not details.items() <= done.details.items():
            self._commit(slot, replace(done, details=done.details | details))

    def _plan_and_begin(
        self, save: SaveId, states: Mapping[str, Any]
    ) -> tuple[dict[str, Plan], dict[str, int], Granted | Skipped]:
        """Have the saver choose a slot while the save is planned; then ask for room in it, unless it has enough."""
        # `begin` takes the connection's lock and `slot` releases it, so `slot` is called after an error, too.
        self._begin(save)
        try:
            # Planning needs no slot, so it overlaps with the saver's
            # choice; sizes follow in a second message if they changed.
            plans, sizes = self._plan(states)
        finally:
            answer = self._link.slot()
        if isinstance(answer, Granted) and not self._images.have(Path(answer.slot), sizes):
            begun = self._begun[1] if self._begun is not None and self._begun[0] == save else {}
            # An earlier call of the same save has images here, too: leaving them out would have the saver remove them.
            asked = {name: image.size for name, image in begun.items()} | sizes
            answer = self._ask_for_room(save, Path(answer.slot), asked)
        return plans, sizes, answer

    def _begin(self, save: SaveId) -> None:
        self._link.begin(save, {}, self._departures.found(save.history) if self._departures else ())

    def _ask_for_room(self, save: SaveId, slot: Path, sizes: dict[str, int]) -> Granted | Skipped:
        self._images.unmap(slot, sizes)  # the kernel frees a replaced file only when nobody maps it
        try:
            self._link.begin(save, sizes)
            return self._link.slot()
        except ArenaTooSmall:
            self._images.unmap(slot, sizes)  # the saver may have given up another slot that is still mapped here
            self._link.begin(save, sizes)
            return self._link.slot()

    def notify(self, save: SaveId, request: SaveRequest, *, path: str = "", stage: str = "snapshot") -> str:
        """Report a committed save to the saver, and whether to persist it, with its model at ``path``.

        Returns why that failed; empty if it did not.
        """
        try:
            with metrics.phase(f"{stage}.notify", step=save.step):
                self._link.committed(save, request, path)
        except TROUBLE as error:
            logger.warning("step %d is in memory, but this could not be reported to the launcher: %s", save.step, error)
            return str(error)
        return ""

    def _plan(self, states: Mapping[str, Any]) -> tuple[dict[str, Plan], dict[str, int]]:
        plans, sizes = self._plans.plan(states)
        # Images are pinned only for states that are on a device: pinning locks memory and takes long.
        self._images.device = next((plan.device for plan in plans.values() if plan.device), None)
        return plans, sizes

    def _prefault(self, names: tuple[str, ...]) -> None:
        end = time.monotonic() + PREFAULT_DEADLINE
        waiting = [slot / name for slot in sorted(self._link.arena.glob("slot-*")) for name in names]
        try:
            # The agent renames an image into place when its pages are reserved: polling the names needs no message.
            while waiting and time.monotonic() < end and not self._closing.wait(0.02):
                for path in [path for path in waiting if path.exists()]:
                    self._images.map(path)
                    waiting.remove(path)
        except OSError as error:
            # The first save maps the missing images, and reports the error.
            logger.debug("mapping ahead of the first save ended: %s", error)

    def close(self) -> None:
        """Unmap all images, when nothing writes to them; raises OverlapError."""
        # the overlap first: its thread writes to the images
        self._closing.set()
        try:
            self._overlap.close()
        finally:
            for thread in self._threads:
                # The thread may be mapping an image right now; unmapping below must come after it.
                thread.join()
            self._filler.close()
            self._images.close()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable Python's cycle collector: the many small objects of a plan would trigger it, and none is garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
