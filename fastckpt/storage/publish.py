"""Writes one checkpoint so that a crash at any instruction leaves the old or the new one whole."""

import contextlib
import errno
import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastckpt import metrics
from fastckpt.errors import BadCheckpoint
from fastckpt.format.ids import SaveId
from fastckpt.format.manifest import JSON, MODEL, NAME, FileEntry, Manifest, Stamp
from fastckpt.storage.claims import DRAFT, DRAFT_PREFIX
from fastckpt.storage.copier import Copier, Copy
from fastckpt.storage.direct import digest_file
from fastckpt.storage.durable import make_directories, move, remove, sync_directory, write_text
from fastckpt.storage.layout import Layout
from fastckpt.storage.quarantine import fault, quarantine
from fastckpt.storage.removal import drop, remove_with_draft
from fastckpt.storage.source import Source
from fastckpt.storage.stored import read_manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What to publish; making one that no manifest could describe raises BadCheckpoint.

    See `CheckpointDirectory.publish`; but ``target`` is as a manifest has it.
    """

    id: SaveId
    images: Mapping[str, Source]
    target: str
    parent: SaveId | None
    world_size: int
    details: Mapping[str, JSON]
    read_back: bool = False

    def __post_init__(self) -> None:
        self.manifest([FileEntry(name, 0, "0" * 32) for name in self.images]).to_json()

    def manifest(self, files: Iterable[FileEntry]) -> Manifest:
        """The manifest of these files, as of now."""
        return Manifest(
            id=self.id,
            parent=self.parent,
            files=tuple(files),
            world_size=self.world_size,
            time=time.time(),
            details=self.details,
            target=self.target,
        )


class Publication:
    """One checkpoint on its way to storage. Made within `Layout.writing`, used once."""

    def __init__(self, layout: Layout, request: Request, copier: Copier) -> None:
        self._layout = layout
        self._request = request
        self._copier = copier
        self._place = layout.draft("tmp")
        self._target = layout.root / request.target if request.target else None
        self._draft = self._target.with_name(DRAFT_PREFIX + secrets.token_hex(6)) if self._target else None
        self._home = layout.record(request.id) if request.target else layout.default(request.id.step)
        self._retired: Path | None = None

    def run(self) -> Manifest:
        """Write everything, then commit; on failure nothing of it is left and the old one is back."""
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._take_back)
            self._place.mkdir(0o700)
            manifest = self._write_manifest(self._write_images())
            self._commit()
            on_failure.pop_all()
        return manifest

    def finish(self) -> None:
        """Remove what this checkpoint replaced, which may be done once `run` has made it durable."""
        with metrics.phase("persist.drop", step=self._request.id.step):
            replaced = [self._retired] if self._retired else []
            replaced += [place for place in self._layout.records() if self._took_over(place)]
            for place in replaced:
                try:
                    why = fault(self._layout, place)
                    quarantine(self._layout, place, why) if why else drop(self._layout, place)
                except OSError as error:
                    logger.warning("cannot remove %s, which was replaced: %s", place, error)

    def _took_over(self, place: Path) -> bool:
        manifest = _ours(place)
        target = self._request.target
        return bool(target and manifest and manifest.target == target and manifest.id != self._request.id)

    def _write_images(self) -> list[FileEntry]:
        if self._target and self._draft:
            make_directories(self._target.parent)
            write_text(self._place / DRAFT, str(self._draft))
            sync_directory(self._place)  # who finds the draft after a crash must be able to tell that it is ours
            sync_directory(self._place.parent)
        return self._copier.each(self._write_image, list(self._request.images.items()))

    def _write_image(self, copy: Copy, image: tuple[str, Source]) -> FileEntry:
        name, source = image
        step, users = self._request.id.step, self._draft if name == MODEL else None
        path = users or self._place / name
        with metrics.phase("persist.write", step=step, file=name):
            if not users:
                path.parent.mkdir(parents=True, exist_ok=True)
            size, digest = copy.file(source.path, path)
            source.compare(size, digest)
        if self._request.read_back:
            with metrics.phase("persist.read_back", step=step, file=name):
                _read_back(path, digest)
        if not users:
            return FileEntry(name, size, digest)
        sync_directory(path.parent)
        found = path.stat()
        return FileEntry(name, size, digest, Stamp(found.st_ino, found.st_mtime_ns))

    def _write_manifest(self, files: list[FileEntry]) -> Manifest:
        with metrics.phase("persist.manifest", step=self._request.id.step):
            manifest = self._request.manifest(files)
            write_text(self._place / NAME, manifest.to_json())
            for directory, _, _ in os.walk(self._place, topdown=False):
                sync_directory(Path(directory))
        return manifest

    def _commit(self) -> None:
        step, home = self._request.id.step, self._home
        with metrics.phase("persist.retire", step=step):
            self._retired = _make_way(self._layout, home)
        if self._target and self._draft:
            with metrics.phase("persist.record", step=step):
                move(self._place, home)
            with metrics.phase("persist.rename", step=step):
                move(self._draft, self._target)
        else:
            with metrics.phase("persist.rename", step=step):
                move(self._place, home)

    def _take_back(self) -> None:
        for step in (self._remove, self._bring_back):
            try:
                step()
            except OSError as error:
                logger.warning("cannot clean up in %s: %s. The next sweep will.", self._layout.private, error)

    def _remove(self) -> None:
        remove_with_draft(self._place)
        if self._draft and self._draft.exists():
            drop(self._layout, self._home)  # the record was in place, its file not yet

    def _bring_back(self) -> None:
        if self._retired and not os.path.lexists(self._home):
            move(self._retired, self._home)


def _read_back(path: Path, digest: str) -> None:
    found = digest_file(path, direct=True)
    if found != digest:
        raise OSError(errno.EIO, f"what was written reads back otherwise: its xxh3-128 is {found}, not {digest}", path)


def write_tracker(layout: Layout, step: int) -> None:
    """Tell other tools the newest step. Readers of ours never trust it, so a failure is only logged."""
    draft = layout.draft("tmp")
    with metrics.phase("persist.tracker", step=step):
        try:
            write_text(draft, str(step))
            move(draft, layout.tracker)
        except OSError as error:
            remove(draft)
            logger.warning("cannot write %s: %s. Checkpoints are found without it.", layout.tracker, error)


def _make_way(layout: Layout, home: Path) -> Path | None:
    """Move aside what lies where a checkpoint belongs; returns its place if it is ours to remove."""
    if not os.path.lexists(home):
        return None
    if why := fault(layout, home):
        logger.warning("%s is bad; it is now %s: %s", home, quarantine(layout, home, why), why)
        return None
    if not home.is_symlink() and _ours(home):
        retired = layout.draft("retired")
        move(home, retired)
        return retired
    aside = home.with_name(f"{home.name}.aside-{secrets.token_hex(6)}")
    move(home, aside)
    logger.warning("%s is no checkpoint of ours; it is now %s, to make way for one", home, aside)
    return None


def _ours(place: Path) -> Manifest | None:
    try:
        return read_manifest(place)
    except BadCheckpoint:
        return None
