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

from fastckpt import metrics
from fastckpt.engine.link import Link
from fastckpt.engine.outcome import Outcome
from fastckpt.engine.overlap import Overlap
from fastckpt.errors import AgentLost, ArenaInUse, ArenaTooSmall, ProtocolError, SaverError
from fastckpt.format.ids import SaveId
from fastckpt.format.plan import Plan, Planner
from fastckpt.ipc.messages import Granted, Skipped
from fastckpt.memory import slots
from fastckpt.memory.fill import Filler
from fastckpt.memory.image import Image

logger = logging.getLogger("fastckpt")

TROUBLE = (AgentLost, ProtocolError, SaverError)
"""Errors of the saver, not of the save."""
PREFAULT_DEADLINE = 600.0
"""Seconds after which a slot that was not made ready is not waited for any more."""


class Snapshotter:
    """Takes snapshots of this writer's states; one state is one image.

    All but `save`'s rest, which ``overlap`` runs, is for when that is over: see `Overlap.wait`.
    """

    def __init__(self, link: Link, threads: int, overlap: Overlap, *, weights_only: bool) -> None:
        self._link = link
        self._overlap = overlap
        self._weights_only = weights_only
        self._planners: dict[str, Planner] = {}
        self._capacities: dict[str, int] = {}
        self._images: dict[Path, Image] = {}
        self._mapping = threading.Lock()
        self._last: tuple[Path, slots.Done] | None = None
        self._outgrown = False
        self._filler = Filler(threads)
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()

    def prepare(self, states: Mapping[str, Any]) -> None:
        """Have memory reserved and mapped for states like these, behind the caller's back; raises ArenaTooSmall."""
        for name, plan in self._plan(states).items():
            self._capacities[name] = self._capacity(name, plan)
        self._link.reserve(self._capacities)
        names = tuple(states)
        thread = threading.Thread(target=self._prefault, args=(names,), name="fastckpt-prefault", daemon=True)
        thread.start()
        self._threads.append(thread)

    def save(self, save: SaveId, states: Mapping[str, Any], *, persist: bool, details: dict[str, Any]) -> Outcome:
        """Copy the states into a slot. Once this returns, they may be changed, but for what waits for the overlap.

        A saver that is gone or in trouble skips the save, and so does a state that has outgrown memory since it was
        saved first, or found its memory taken by others: that is no reason to end training.

        Raises:
            NotLoadable, ArenaTooSmall: The save cannot be made; the checkpoints before it stay.
        """
        step = save.step
        try:
            with _no_garbage_collection(), metrics.phase("snapshot.skeleton", step=step):
                plans, sizes, answer = self._plan_and_begin(save, states)
        except TROUBLE as error:
            logger.warning("step %d was not saved: %s", step, error)
            return Outcome(str(error), str(error))
        except ArenaTooSmall as error:
            if self._last is None:
                raise
            if not self._outgrown:
                logger.warning("saves are skipped from step %d on: %s", step, error)
            self._outgrown = True
            return Outcome(str(error), "")
        if isinstance(answer, Skipped):
            return Outcome(answer.reason, answer.trouble)
        self._capacities |= sizes
        outcome = self._fill(Path(answer.slot), plans, slots.Done(save, sizes, details), persist)
        return replace(outcome, trouble=outcome.trouble or answer.trouble)

    def _fill(self, slot: Path, plans: dict[str, Plan], done: slots.Done, persist: bool) -> Outcome:
        try:
            self._link.stay()
            with _no_garbage_collection(), metrics.phase("snapshot.fill", step=done.id.step):
                images = {name: self._image(slot / name) for name in plans}
                copies = [copy for name, plan in plans.items() for copy in images[name].install(plan)]
                still, now, later = self._overlap.part(plans.values(), copies)
                self._filler.fill(now)
        except (OSError, ArenaInUse) as error:
            return Outcome(f"{slot} cannot be written to: {error}", "")
        finish = partial(self._finish, slot, done, list(images.values()), persist)
        if still is not None and later:
            self._overlap.begin(done.id, still, later, partial(finish, "overlap"))
            return Outcome("", "", pending=True)
        outcome = finish("snapshot")
        if still is not None and not outcome.skipped:
            self._overlap.watch(done.id, still)
        return outcome

    def _finish(self, slot: Path, done: slots.Done, images: Sequence[Image], persist: bool, stage: str) -> Outcome:
        """Commit and tell, when all is copied; ``stage`` begins the names of the phases."""
        try:
            with metrics.phase(f"{stage}.commit", step=done.id.step):
                if lost := [image.path for image in images if not image.is_current()]:
                    raise FileNotFoundError(f"{lost[0]} was removed")
                self._commit(slot, done)
        except OSError as error:
            return Outcome(f"{slot} cannot be written to: {error}", "")
        metrics.event("saved", step=done.id.step, rank=self._link.place.rank)
        return Outcome("", self.notify(done.id, persist=persist, stage=stage))

    def _commit(self, slot: Path, done: slots.Done) -> None:
        slots.commit(slot, self._link.place.local_rank, done)
        self._last, self._outgrown = (slot, done), False

    def add_details(self, details: dict[str, Any]) -> None:
        """Keep more with the checkpoint that was saved last, as long as it is not persisted; raises OSError."""
        if self._last is not None:
            slot, done = self._last
            self._commit(slot, replace(done, details=done.details | details))

    def _plan_and_begin(
        self, save: SaveId, states: Mapping[str, Any]
    ) -> tuple[dict[str, Plan], dict[str, int], Granted | Skipped]:
        """Let the saver choose a slot while we plan; then ask for room in it, unless it has what we need."""
        self._link.begin(save, {})
        try:
            plans = self._plan(states)
        finally:
            answer = self._link.slot()
        sizes = {name: self._capacity(name, plan) for name, plan in plans.items()}
        if isinstance(answer, Granted) and not self._has_room(Path(answer.slot), sizes):
            answer = self._ask_for_room(save, Path(answer.slot), sizes)
        return plans, sizes, answer

    def _ask_for_room(self, save: SaveId, slot: Path, sizes: dict[str, int]) -> Granted | Skipped:
        self._unmap(slot, sizes)
        try:
            self._link.begin(save, sizes)
            return self._link.slot()
        except ArenaTooSmall:
            self._unmap(slot, sizes)  # the saver may have given up a slot that we had mapped
            self._link.begin(save, sizes)
            return self._link.slot()

    def _unmap(self, slot: Path, sizes: dict[str, int]) -> None:
        """Let go of images that are to be replaced, or were: their memory is free only then."""
        with self._mapping:
            for path, image in list(self._images.items()):
                if (path.parent == slot and image.size != sizes.get(path.name)) or not image.is_current():
                    self._images.pop(path).close()

    def _has_room(self, slot: Path, sizes: dict[str, int]) -> bool:
        images = {name: self._images.get(slot / name) for name in sizes}
        return all(image and image.size == sizes[name] and image.is_current() for name, image in images.items())

    def notify(self, save: SaveId, *, persist: bool, path: str = "", stage: str = "snapshot") -> str:
        """Tell the saver of what is in memory, and whether to persist it, with its model at ``path``.

        Returns why it could not be told; empty if it was.
        """
        try:
            with metrics.phase(f"{stage}.notify", step=save.step):
                self._link.committed(save, persist=persist, path=path)
        except TROUBLE as error:
            logger.warning("step %d is in memory, but the launcher was not told: %s", save.step, error)
            return str(error)
        return ""

    def _plan(self, states: Mapping[str, Any]) -> dict[str, Plan]:
        for name in states.keys() - self._planners.keys():
            self._planners[name] = Planner(weights_only=self._weights_only)
        return {name: self._planners[name].plan(state) for name, state in states.items()}

    def _capacity(self, name: str, plan: Plan) -> int:
        """The size of the image: that of the last save if it fits, so that mappings last."""
        last = self._capacities.get(name, 0)
        return last if plan.skeleton.fits(last) else plan.skeleton.capacity()

    def _image(self, path: Path) -> Image:
        with self._mapping:
            if path in self._images and not self._images[path].is_current():
                self._images.pop(path).close()
        return self._map(path)

    def _map(self, path: Path) -> Image:
        """The image at a path as it was mapped first: it may be in use by another thread."""
        with self._mapping:
            if path not in self._images:
                self._images[path] = Image(path)
            return self._images[path]

    def _prefault(self, names: tuple[str, ...]) -> None:
        end = time.monotonic() + PREFAULT_DEADLINE
        waiting = [slot / name for slot in sorted(self._link.arena.glob("slot-*")) for name in names]
        try:
            while waiting and time.monotonic() < end and not self._closing.wait(0.02):
                for path in [path for path in waiting if path.exists()]:
                    self._map(path)
                    waiting.remove(path)
        except OSError as error:
            logger.debug("mapping ahead of the first save ended: %s", error)

    def close(self) -> None:
        """Unmap all images, when nothing writes to them; raises OverlapError."""
        self._closing.set()
        try:
            self._overlap.close()
        finally:
            for thread in self._threads:
                thread.join()
            self._filler.close()
            with self._mapping:
                for image in self._images.values():
                    image.close()
                self._images.clear()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Hold back Python's cycle collector: the many small objects of a plan would set it off, to no avail."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
