"""Verification of checkpoints in any tier: reads every byte and compares it with the saved digests."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fastckpt._core.inspect.address import Address
from fastckpt._core.inspect.checkpoint_files import fits
from fastckpt._core.inspect.inventory import (
    DAMAGED,
    INCOMPLETE,
    WHOLE,
    Inventory,
    InventoryFile,
    InventoryItem,
    place_of,
)
from fastckpt._core.inspect.work_progress import UNOBSERVED, WorkObserver, share_of
from fastckpt._core.storage.local.layout import TRACKER
from fastckpt._core.storage.reading import digest_of, read_text
from fastckpt._core.storage.store import open_store
from fastckpt.errors import BadCheckpoint, ConfigError

LOOKS = (0.1, 0.3)
"""Seconds before the tracker is looked at again."""
GOOD, BAD, UNKNOWN = "good", "bad", "unknown"


@dataclass(frozen=True)
class Finding:
    """The result of the check of one file.

    Attributes:
        item: The checkpoint that it belongs to; None if it belongs to the directory.
        path: The file, or the directory of a checkpoint with unknown files.
        verdict: GOOD, BAD, or UNKNOWN: it has no record to compare with, or it changed meanwhile.
        why: Fault, or the reason why it is not known.
        expected: The digest that was saved; "" if none was.
        found: The digest of its bytes now; "" if it was not read to its end.
    """

    item: InventoryItem | None
    path: Path | str
    verdict: str
    why: str = ""
    expected: str = ""
    found: str = ""


def select(inventory: Inventory, address: Address, *, everything: bool) -> list[InventoryItem]:
    """Select the checkpoints to check; without a step the newest whole one, and those that are seen to be bad.

    Raises:
        ConfigError: There is no such checkpoint.
    """
    items = [item for item in inventory.items if fits(item, address)]
    newest = max((item.id or () for item in items if item.state == WHOLE), default=None)
    latest = [item for item in items if item.state == WHOLE and item.id == newest]
    bad = [item for item in items if item.state in (DAMAGED, INCOMPLETE)]
    if address.explicit and address.step is None:
        chosen = latest
    elif address.explicit or everything:
        chosen = [item for item in items if item.state in (WHOLE, INCOMPLETE, DAMAGED)]
    else:
        chosen = latest + bad
    if not (chosen or items):
        if inventory.items:
            raise ConfigError(f"there is no {address} to check; fastckpt ls shows what {inventory.location} has")
        others = "".join(f"; {path} seems to be of {writer}, without digests" for path, writer in inventory.foreign[:1])
        raise ConfigError(f"{inventory.location} has no checkpoint of fastckpt to check{others}")
    return chosen or items


def verify_all(
    inventory: Inventory, items: list[InventoryItem], *, tracker: bool, observer: WorkObserver = UNOBSERVED
) -> list[Finding]:
    """Check checkpoints, and the tracker if it is asked for."""
    observer.begin("verify", sum(item.size for item in items if item.state == WHOLE))
    findings = [finding for item in items for finding in verify(item, observer)]
    last = verify_tracker(inventory) if tracker else None
    return [*findings, last] if last else findings


def verify(item: InventoryItem, observer: WorkObserver = UNOBSERVED) -> Iterator[Finding]:
    """Check the files of a whole checkpoint, one after the other; the others are bad as they are.

    The observer gets the number of bytes that are read, but not the begin.
    """
    if item.state != WHOLE:
        yield Finding(item, item.path, BAD, item.why)
        return
    for file in item.files.values():
        with share_of(observer, file.size) as advance:
            finding = check(item, file, advance)
        yield finding


def check(item: InventoryItem, file: InventoryFile, on_read: Callable[[int], None] | None = None) -> Finding:
    """Check one file of a whole checkpoint; ``on_read`` is called with each number of bytes."""
    try:
        found = digest_of(file.path, file.size, on_read)
    except BadCheckpoint as error:
        return _unless_changed(item, Finding(item, file.path, BAD, str(error), file.digest))
    if not file.digest:
        why = "no digest yet: memory gets one when it has been the newest for a second, or is persisted"
        return Finding(item, file.path, UNKNOWN, why, "", found)
    if found != file.digest:
        why = f"its xxh3-128 is {found}; {file.digest} was saved"
        return _unless_changed(item, Finding(item, file.path, BAD, why, file.digest, found))
    return Finding(item, file.path, GOOD, "", file.digest, found)


def _unless_changed(item: InventoryItem, finding: Finding) -> Finding:
    if item.unchanged():
        return finding
    return Finding(
        item, finding.path, UNKNOWN, "its job took the slot for a newer save, or deleted it, while it was read"
    )


def verify_tracker(inventory: Inventory) -> Finding | None:
    """Check that the tracker names the checkpoint that was published last; None if there is no checkpoint.

    We never read it, but other tools do.
    """
    finding = None
    for wait in (0.0, *LOOKS):  # a job that is publishing just now moves it a moment after the checkpoint
        time.sleep(wait)
        finding = _look_at_tracker(inventory.location)
        if finding is None or finding.verdict == GOOD:
            break
    return finding


def _look_at_tracker(location: str) -> Finding | None:
    path = f"{location}/{TRACKER}"
    with closing(open_store(location)) as store:
        stored = store.checkpoints()
    if not stored:
        return None
    last = max(stored, key=lambda one: float(one.manifest.time)).id.step
    try:
        text = read_text(place_of(location), TRACKER)
    except OSError as error:
        return Finding(None, path, BAD, f"it cannot be read: {error.strerror}")
    if text is None or text.strip() != str(last):
        why = "it is not there" if text is None else f"it contains {text[:40]!r}"
        return Finding(None, path, BAD, f"{why}; step {last} came last")
    return Finding(None, path, GOOD)
