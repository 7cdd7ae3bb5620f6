"""One node's part of a checkpoint as a manifest of its own, and how parts make one checkpoint."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from fastckpt._core.format.completeness import RANKS
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import JSON, Manifest, is_target
from fastckpt.errors import BadCheckpoint

LISTED = 8
"""Number of nodes that a message names."""
MOST_NODES = 1_000_000
"""Nodes of a checkpoint at most; nobody has written more."""
_DETAIL = "share"


@dataclass(frozen=True)
class Share:
    """Part of a checkpoint that one node has.

    Attributes:
        node: Its number, from 0 on; the first one has the model.
        nodes: Number of nodes.
        attempt: Distinguishes a run of the job from others that happen to give their histories the same number.
        target: The file that the user named, as a manifest has it.
    """

    node: int
    nodes: int
    attempt: str = ""
    target: str = ""

    @property
    def key(self) -> str:
        """The same for all parts that belong together, and for no others of the same id: 12 hexadecimal digits."""
        text = json.dumps([self.nodes, self.attempt, self.target])
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()

    def mark(self, part: Manifest) -> Manifest:
        """The manifest of this part, marked as one of a part."""
        return replace(part, details={**part.details, _DETAIL: asdict(self)})

    def owns(self, part: Manifest | None, node: int) -> bool:
        """Return whether this is a node's part of the same checkpoint."""
        return share_of(part) == replace(self, node=node)


def _ranks_of(parts: Sequence[Manifest]) -> dict[str, JSON]:
    """Return the files that the ranks of all nodes have written; empty if an earlier version has made a part."""
    written = [each if isinstance(each := part.details.get(RANKS), dict) else None for part in parts]
    merged = {rank: files for each in written if each for rank, files in each.items()}
    return {RANKS: merged} if None not in written else {}


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that several nodes were writing, and that does not count.

    Attributes:
        id: Id of the save.
        why: Missing parts, or the reason why it cannot be published.
    """

    id: SaveId
    why: str


def lacking(share: Share, missing: Sequence[int]) -> str:
    """Describe the nodes with missing parts."""
    listed = ", ".join(map(str, missing[:LISTED])) + (", ..." if len(missing) > LISTED else "")
    return f"it lacks the parts of {len(missing)} of {share.nodes} nodes: {listed}"


def share_of(part: Manifest | None) -> Share | None:
    """Return the part that a manifest is of; None if of none."""
    match part.details.get(_DETAIL) if part else None:
        case {"node": int(node), "nodes": int(nodes), "attempt": str(attempt), "target": str(target)}:
            if 0 <= node < nodes <= MOST_NODES and (not target or is_target(target)):
                return Share(node, nodes, attempt, target)
    return None


def name_of(node: int) -> str:
    """Return the file name of the manifest of a node's part."""
    return f"part-{node}.json"


def assemble(parts: Sequence[Manifest], target: str) -> Manifest:
    """The manifest of all parts together, in the order of the nodes: each node makes the same one.

    Raises BadCheckpoint if they do not go together.
    """
    if len({(part.id, part.world_size, part.parent) for part in parts}) > 1:
        raise BadCheckpoint(f"the parts of {parts[0].id} are of jobs with different numbers of ranks, or parents")
    return replace(
        parts[0],
        files=tuple(entry for part in parts for entry in part.files),
        time=max(part.time for part in parts),
        details={name: value for name, value in parts[0].details.items() if name not in (_DETAIL, RANKS)}
        | _ranks_of(parts),
        target=target,
    )
