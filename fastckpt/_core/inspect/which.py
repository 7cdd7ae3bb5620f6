"""The choice of the next launch on this node: the checkpoint that it would resume, and why none of the others."""

from dataclasses import dataclass
from pathlib import Path

from fastckpt._core.format.completeness import lacks, missing_files
from fastckpt._core.inspect.inventory import DAMAGED, INCOMPLETE, QUARANTINED, WHOLE, Inventory, InventoryItem
from fastckpt._core.inspect.verify import BAD, verify
from fastckpt._core.inspect.work_progress import UNOBSERVED, WorkObserver
from fastckpt._core.policy.resume import CheckpointLocation, choose
from fastckpt._core.storage.local.foreign_files import foreign
from fastckpt._core.storage.store import is_url

RESUME, FRESH, REFUSE = "resume", "fresh start", "refuse"


@dataclass(frozen=True)
class ResumeDecision:
    """The decision that a launch would make.

    Attributes:
        outcome: RESUME; FRESH: there is nothing to resume; REFUSE: checkpoints exist, but none can be loaded.
        choice: Checkpoint that would be resumed.
        others: Every other checkpoint, newest first, and why it is not the one.
    """

    outcome: str
    choice: InventoryItem | None
    others: list[tuple[InventoryItem, str]]


def decide(inventory: Inventory, *, verifies: bool = False, observer: WorkObserver = UNOBSERVED) -> ResumeDecision:
    """Choose as a resume of as many ranks as saved would.

    Args:
        inventory: Checkpoints that there are.
        verifies: Whether to check digests, as a resume does before it loads, and to choose again where they are bad.
        observer: Follows that.
    """
    objections = {id(item): _objection(item) for item in inventory.items}
    candidates = {_candidate(item): item for item in inventory.items if not objections[id(item)]}
    excluded: set[CheckpointLocation] = set()
    while (choice := choose([candidates], excluded)) is not None:
        bad = _bad_files(candidates[choice[0]], observer) if verifies else ""
        if not bad:
            break
        excluded |= {*choice}
        objections[id(candidates[choice[0]])] = bad
    chosen = candidates[choice[0]] if choice else None
    others = [(item, objections[id(item)] or _rank(item, chosen)) for item in inventory.items if item is not chosen]
    return ResumeDecision(_outcome(inventory, chosen), chosen, others)


def _objection(item: InventoryItem) -> str:
    """The reason why no resume takes a checkpoint; empty if one may."""
    if item.state == INCOMPLETE:
        return item.why
    if item.state != WHOLE:
        return f"{item.state}: {item.why}"
    world = item.world or 1
    missing = missing_files(item.files.keys(), world, item.details)
    if missing and item.tier == "memory":
        return f"not for all of {world} ranks: this node's memory has no {', '.join(missing)}"
    return lacks(missing, world) if missing else ""


def _bad_files(item: InventoryItem, observer: WorkObserver) -> str:
    observer.begin(f"verify step {item.step}", item.size)
    bad = [found for found in verify(item, observer) if found.verdict == BAD]
    return "; ".join(f"damaged: {found.path}: {found.why}" for found in bad)


def _rank(item: InventoryItem, chosen: InventoryItem | None) -> str:
    if chosen is None:
        return ""
    return f"{chosen.tier} is nearer than {item.tier}" if item.id == chosen.id else "older"


def _candidate(item: InventoryItem) -> CheckpointLocation:
    return CheckpointLocation(item.history or 0, item.step or 0, item.tier)


def _outcome(inventory: Inventory, chosen: InventoryItem | None) -> str:
    if chosen is not None:
        return RESUME
    # A checkpoint that was never whole, or is another directory's, does not keep a job from a fresh start.
    exists = any(item.state in (WHOLE, INCOMPLETE, DAMAGED, QUARANTINED) for item in inventory.items)
    theirs = not is_url(inventory.location) and foreign(Path(inventory.location))
    return REFUSE if exists or theirs else FRESH
