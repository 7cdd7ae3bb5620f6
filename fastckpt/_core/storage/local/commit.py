"""Makes a directory that is complete count as the checkpoint that it holds; the last of its renames commits."""

import logging
from pathlib import Path

from fastckpt._core import metrics
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import LATEST, MODEL, Manifest, file_named, is_plain
from fastckpt._core.storage.local.layout import Layout
from fastckpt._core.storage.local.named_file import NamedFile
from fastckpt._core.storage.local.places import drop, make_room, relocate, remove_apart
from fastckpt._core.storage.local.quarantine import fault, quarantine
from fastckpt._core.storage.local.scan import CheckpointReader
from fastckpt._core.storage.local.stored import ours
from fastckpt.errors import Superseded

logger = logging.getLogger(__name__)


class Commit:
    """One checkpoint on its way from a private place to where it belongs. Made within `Layout.writing`.

    Args:
        layout: The checkpoint directory.
        id: Id of the save.
        target: The file or directory that the user named, as a manifest has it; empty for none.
        place: The directory with all files, durable but for its own name.
        named: The file that the user named, if this process was asked for it, and it is outside of the checkpoint.
        reader: Finds checkpoints that were saved to the same target before.
    """

    def __init__(
        self, layout: Layout, id: SaveId, target: str, place: Path, named: NamedFile | None, reader: CheckpointReader
    ) -> None:
        self.home = layout.home(id, target)
        self._layout = layout
        self._id = id
        self._target = target
        self._place = place
        self._reader = reader
        self._named = named
        self._retired: Path | None = None
        self._aside: Path | None = None

    def run(self) -> None:
        """Do the renames; the checkpoint counts, durably, when this returns. On OSError the old one is back."""
        step = self._id.step
        try:
            if self._named:
                self._named.prepare(self._place / MODEL)
            with metrics.phase("persist.retire", step=step):
                self._aside = _make_way(self._layout, self.home)
                if self._aside and self._aside.parent == self._layout.private:
                    self._retired = self._aside
                self._give_way()
            with metrics.phase("persist.rename", step=step):
                self._layout.files.move(self._place, self.home)
            if self._named:
                with metrics.phase("persist.link", step=step):
                    self._named.put()
        except BaseException:
            self._take_back()
            raise

    def _take_back(self) -> None:
        """Move the retired checkpoint back, unless the new one took its place."""
        try:
            if self._aside and not self._layout.files.exists(self.home):
                self._layout.files.move(self._aside, self.home)
            if self._named:
                self._named.withdraw()
        except OSError as error:
            logger.warning("cannot clean up in %s: %s. The next sweep will.", self._layout.private, error)

    def _give_way(self) -> None:
        """Raise Superseded if the retired checkpoint is newer."""
        there = ours(self._retired) if self._retired else None
        if there and there.id > self._id:
            raise Superseded(f"{self._id} is not published: {self.home} is that of {there.id}, which is newer")

    def finish(self, manifest: Manifest) -> None:
        """Update the files for other tools, and remove replaced checkpoints, now that this one is durable."""
        _write_trackers(self._layout, manifest)
        with metrics.phase("persist.drop", step=self._id.step):
            there = ours(self.home)  # else somebody has found it bad, and the retired one is needed
            replaced = [self._retired] if self._retired and there and there.id == self._id else []
            replaced += [place for place in self._same_target() if place not in replaced]
            replaced += [place for id, place in self._layout.parts() if id < self._id]
            for place in replaced:
                try:
                    old, why = ours(place), fault(self._layout, place)
                    if why:
                        quarantine(self._layout, place, why)
                    elif old:
                        make_room(self._layout, place, old, manifest)
                    else:
                        drop(self._layout, place)
                except OSError as error:
                    logger.warning("cannot remove %s, which was replaced: %s", place, error)

    def _same_target(self) -> list[Path]:
        """Older checkpoints that were saved to the path which is this one's now."""
        if not file_named(self._target):
            return []
        found = (stored for stored in self._reader.with_target(self._target) if stored.id < self._id)
        return [stored.place for stored in found if ours(stored.place) == stored.manifest]


def _write_trackers(layout: Layout, manifest: Manifest) -> None:
    """Write the newest step for other tools, and the directory for a framework's tools, to the files that they read.

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
        layout.files.write_text(draft, text)
        layout.files.move(draft, tracker)
    except OSError as error:
        layout.files.remove(draft)
        logger.warning("cannot write %s: %s. Checkpoints are found without it.", tracker, error)


def _make_way(layout: Layout, home: Path) -> Path | None:
    """Move aside files in a checkpoint's place; returns their new path, a private one if they are ours to remove."""
    if layout.files.is_directory(home) and layout.apart(home):
        remove_apart(layout, home)  # left by a writer that died
    layout.files.remove_empty(home)  # users make the directory of a file before they name it
    if not layout.files.exists(home):
        return None
    if why := fault(layout, home):
        logger.warning("%s is bad; moved it to %s: %s", home, quarantine(layout, home, why), why)
        return None
    if layout.files.is_directory(home) and ours(home):
        retired = layout.draft("retired")
        relocate(layout, home, retired)
        return retired
    aside = layout.aside(home)
    relocate(layout, home, aside)
    what = "a link" if aside.is_symlink() else "no checkpoint of ours"
    logger.warning("%s is %s; moved it to %s, since a checkpoint takes its place", home, what, aside)
    return aside
