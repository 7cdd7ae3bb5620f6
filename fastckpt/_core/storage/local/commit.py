"""Makes a directory that is complete count as the checkpoint that it holds; the last of its renames commits."""

import contextlib
import logging
import os
import secrets
from pathlib import Path

from fastckpt._core import metrics
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import LATEST, MODEL, Manifest, file_named, is_plain
from fastckpt._core.io.durable import move, remove, sync_directory, write_text
from fastckpt._core.storage.local.layout import Layout
from fastckpt._core.storage.local.named_file import NamedFile, link_within, named_file
from fastckpt._core.storage.local.places import clear_remains, drop, relocate
from fastckpt._core.storage.local.quarantine import fault, quarantine
from fastckpt._core.storage.local.scan import CheckpointReader
from fastckpt._core.storage.local.stored import ours
from fastckpt.errors import Superseded

logger = logging.getLogger(__name__)


class Commit:
    """One checkpoint on its way from a private place to where it belongs. Made within `Layout.writing`.

    Args:
        layout: The checkpoint directory.
        id: What was saved.
        target: The file or directory that the user named, as a manifest has it; empty for none.
        place: The directory with all files, durable but for its own name.
        reader: Finds what was saved to the same target before.
    """

    def __init__(self, layout: Layout, id: SaveId, target: str, place: Path, reader: CheckpointReader) -> None:
        self.home = layout.home(id, target)
        self._layout = layout
        self._id = id
        self._target = target
        self._place = place
        self._reader = reader
        self._named = named_file(layout, id, target)
        self._name_within = layout.name_within(id, target)
        self._retired: Path | None = None

    def run(self) -> None:
        """Do the renames that are still to be done; the checkpoint counts, durably, when this returns."""
        step = self._id.step
        if self._place.exists():
            if self._named:
                self._prepare(self._named)
            elif self._name_within:
                link_within(self._place, self._name_within)
            with metrics.phase("persist.retire", step=step):
                self._retired = _make_way(self._layout, self.home)
                self._give_way()
            with metrics.phase("persist.rename", step=step):
                move(self._place, self.home)
        if self._named:
            with metrics.phase("persist.link", step=step):
                self._named.put()

    def _prepare(self, named: NamedFile) -> None:
        for directory in self._place.parents:
            if not directory.is_relative_to(self._layout.private):
                break
            sync_directory(directory)  # a sweep finds the draft by the manifest in the place
        named.prepare(self._place / MODEL)

    def _give_way(self) -> None:
        """Raise Superseded if what made way is newer; `bring_back` is called then."""
        there = ours(self._retired) if self._retired else None
        if there and there.id > self._id:
            raise Superseded(f"{self._id} is not published: {self.home} is that of {there.id}, which is newer")

    def bring_back(self) -> None:
        """Have what made way where it was, unless the new one took its place."""
        if self._retired and not os.path.lexists(self.home):
            move(self._retired, self.home)

    def finish(self, manifest: Manifest) -> None:
        """Tell other tools, and remove what this checkpoint replaced, now that it is durable."""
        _write_trackers(self._layout, manifest)
        with metrics.phase("persist.drop", step=self._id.step):
            there = ours(self.home)  # else somebody has found it bad, and what made way is needed
            replaced = [self._retired] if self._retired and there and there.id == self._id else []
            replaced += [place for place in self._same_target() if place not in replaced]
            replaced += [place for id, place in self._layout.parts() if id < self._id]
            for place in replaced:
                try:
                    why = "" if self._layout.is_record(place) else fault(self._layout, place)  # its model is replaced
                    quarantine(self._layout, place, why) if why else drop(self._layout, place)
                except OSError as error:
                    logger.warning("cannot remove %s, which was replaced: %s", place, error)

    def _same_target(self) -> list[Path]:
        """Older checkpoints that were saved to the path which is this one's now."""
        if not file_named(self._target):
            return []
        found = (stored for stored in self._reader.with_target(self._target) if stored.id < self._id)
        return [stored.place for stored in found if ours(stored.place) == stored.manifest]


def _write_trackers(layout: Layout, manifest: Manifest) -> None:
    """Tell other tools the newest step, and those of a framework the directory, in the file that they read.

    Readers of ours never trust them, so a failure is only logged.
    """
    step, name = manifest.id.step, manifest.details.get(LATEST)
    trackers = {layout.tracker: str(step)}
    if isinstance(name, str) and is_plain(name):
        trackers[layout.root / name] = layout.home(manifest.id, manifest.target).name
    with metrics.phase("persist.tracker", step=step):
        for tracker, text in trackers.items():
            _write_tracker(layout, tracker, text)


def _write_tracker(layout: Layout, tracker: Path, text: str) -> None:
    draft = layout.draft("tmp")
    try:
        write_text(draft, text)
        move(draft, tracker)
    except OSError as error:
        remove(draft)
        logger.warning("cannot write %s: %s. Checkpoints are found without it.", tracker, error)


def _make_way(layout: Layout, home: Path) -> Path | None:
    """Move aside what lies where a checkpoint belongs; returns its place if it is ours to remove."""
    clear_remains(layout, home)
    with contextlib.suppress(OSError):
        home.rmdir()  # users make the directory of a file before they name it
    if not os.path.lexists(home):
        return None
    if why := fault(layout, home):
        logger.warning("%s is bad; it is now %s: %s", home, quarantine(layout, home, why), why)
        return None
    if not home.is_symlink() and ours(home):
        retired = layout.draft("retired")
        relocate(layout, home, retired)
        return retired
    aside = home.with_name(f"{home.name}.aside-{secrets.token_hex(6)}")
    relocate(layout, home, aside)
    logger.warning("%s is no checkpoint of ours; it is now %s, to make way for one", home, aside)
    return None
