"""Sets bad checkpoints aside for a person to look at: nothing of ours loads them, nor deletes them."""

import errno
from datetime import UTC, datetime
from pathlib import Path

from fastckpt._core.format.manifest import NAME, Manifest
from fastckpt._core.io.regular_file import read_small
from fastckpt._core.storage.local.layout import Layout
from fastckpt._core.storage.local.places import relocate
from fastckpt._core.storage.local.stored import Stored, ours, read_manifest
from fastckpt.errors import BadCheckpoint

WHY = "why.txt"
"""The file in a bad checkpoint's directory with the time of its quarantine, its place before, and its fault."""
_REASON = "why: "
_LONGEST = 1 << 16
"""Bytes of a ``why.txt`` that is read."""


def quarantine(layout: Layout, place: Path, why: str) -> Path:
    """Move a bad place out of the way, with the reason; returns where it is now.

    The reason is durable before the place moves: a crash leaves it where it was, or aside with its reason. A file
    that a user named stays where they put it. Raises OSError if storage refuses, and for a place without a manifest.
    """
    is_directory = layout.files.is_directory(place)
    if is_directory and not layout.files.exists(place / NAME):
        raise FileNotFoundError(
            errno.ENOENT, "without a manifest it may be another tool's, and is not moved", str(place)
        )
    manifest = ours(place)
    name = f"{manifest.id.history}-{manifest.id.step}" if manifest else place.name
    if is_directory:
        layout.files.unlink(place / WHY)  # of a writer that died before the move, or that came back with the place
        layout.files.write_text(place / WHY, _text(layout, place, manifest, why))
        layout.files.sync(place)
    aside = layout.draft(f"quarantine-{name}")
    relocate(layout, place, aside)
    return aside


def fault(layout: Layout, place: Path) -> str:
    """Return the visible fault of the checkpoint in a place; empty for none, or if there is no checkpoint."""
    try:
        manifest = read_manifest(place)
        if manifest:
            Stored(manifest, place, layout.file_of(manifest)).check_sizes()
    except BadCheckpoint as error:
        return str(error)
    return ""


def _text(layout: Layout, place: Path, manifest: Manifest | None, why: str) -> str:
    lines = [
        f"when: {datetime.now(UTC).isoformat(timespec='seconds')}",
        f"from: {place}",
        _REASON + " ".join(why.split()),
    ]
    if manifest and (file := layout.file_of(manifest)):
        lines.append(f"file: {file} (left where it is)")
    lines.append("If it can be repaired, move this directory back to where it was; else remove it.")
    return "\n".join(lines) + "\n"


def reason(place: Path) -> str:
    """Return why a place was quarantined."""
    try:
        lines = read_small(place / WHY, _LONGEST).decode(errors="replace").splitlines()
    except OSError as error:
        return f"{place / WHY} cannot be read: {error.strerror}"
    return next((line.removeprefix(_REASON) for line in lines if line.startswith(_REASON)), "no reason was recorded")
