"""Memory that the checkpoints of a job take on each node: images, slots, limits; also for other numbers of ranks."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fastckpt._core.policy.memory_reserve import RESERVE, limit_for
from fastckpt._core.policy.replicas.copy_sizes import room
from fastckpt.errors import ConfigError

PAGE = 4096
"""Bytes in which a tmpfs gives memory."""
ENTRY = 100
"""Bytes of a record for each file that it names."""
OWN_PAGES = 3
"""Pages of an arena beside its slots and its writers' records: its owner, its claim and the directory's mark."""
TELEMETRY = 192
"""Bytes of telemetry of a rank."""


class Role(enum.StrEnum):
    """Multiplicity of a file of a checkpoint in the memory of a job's nodes.

    NODE: on each node. RANK: one for each rank, of a size that the number of ranks does not change. SHARD: one for each
    rank, which together have the whole. OTHER: once, where the rank is that wrote it.
    """

    NODE = "on each node"
    RANK = "of each rank"
    SHARD = "a shard of each rank"
    OTHER = "once"


@dataclass(frozen=True)
class SavedFile:
    """A file of a checkpoint: its bytes, its role, and the rank that wrote it, if one is known."""

    name: str
    size: int
    role: Role
    rank: int | None = None


@dataclass(frozen=True)
class JobShape:
    """Nodes of a job, and ranks on each."""

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class NodeImages:
    """Memory that one save takes on a node.

    Attributes:
        images: Bytes of all images, as many as of their files.
        files: Their number.
        slot: Bytes of a slot with them: whole pages, and the slot's records.
        copies: Bytes of copies of other nodes' files, beside the slots.
    """

    images: int
    files: int
    slot: int
    copies: int = 0

    def arena(self, slots: int, ranks: int) -> int:
        """Bytes of an arena with so many slots, and of the telemetry, for so many ranks on the node."""
        return slots * self.slot + self.copies + (OWN_PAGES + ranks) * PAGE + pages(ranks * TELEMETRY)


def pages(size: int) -> int:
    """Bytes of the whole pages that hold so many bytes."""
    return -(-size // PAGE) * PAGE


def reshaped(files: Sequence[SavedFile], saved: int, shape: JobShape) -> list[SavedFile]:
    """The files of the same state, saved by the ranks of another shape than the ``saved`` ranks that wrote these.

    Shards are divided again: the largest is as much larger than their mean as the largest was. Files on each node, or
    of a rank, stay as they are; the index of shards has as many more entries as there are more of them.

    Raises:
        ConfigError: A framework laid files out in a way of its own, so that their number is not known.
    """
    if shape.ranks == saved:
        return list(files)
    if odd := [file.name for file in files if file.role is Role.OTHER]:
        raise ConfigError(
            f"{odd[0]} was written by {saved} ranks in a layout of their framework; how large it is with {shape.ranks} "
            f"is not known. Plan for {saved} ranks, or save once with {shape.ranks} and plan from that"
        )
    sizes = [file.size for file in files if file.role is Role.SHARD]
    largest = max(sizes, default=0) / fmean(sizes) * sum(sizes) / shape.ranks if sum(sizes) else 0
    own = [file for file in files if file.role is Role.RANK]
    found = [_indexed(file, saved, shape.ranks, sharded=bool(sizes)) for file in files if file.role is Role.NODE]
    for rank in range(shape.ranks):
        found += [SavedFile(f"__{rank}_0.distcp", round(largest), Role.SHARD, rank)] if sizes else []
        found += [SavedFile(f"rank_{rank}.pt", max(file.size for file in own), Role.RANK, rank)] if own else []
    return found


def _indexed(file: SavedFile, saved: int, ranks: int, *, sharded: bool) -> SavedFile:
    is_index = sharded and file.name == ".metadata"
    return SavedFile(file.name, round(file.size * ranks / saved), file.role) if is_index else file


def per_node(files: Sequence[SavedFile], shape: JobShape) -> list[NodeImages]:
    """Return the memory that a save takes on each node, by its number.

    With several nodes, each keeps one copy of another node's files.
    """
    common = [file.size for file in files if file.role is Role.NODE]
    sizes: list[list[int]] = [[] for _ in range(shape.nodes)]
    for file in files:
        if file.role is not Role.NODE:
            sizes[min((file.rank or 0) // shape.ranks_per_node, shape.nodes - 1)].append(file.size)
    copies = max(room(map(pages, own), 1) for own in sizes) if shape.nodes > 1 else 0
    all_of = [[*common, *own] for own in sizes]
    return [NodeImages(sum(own), len(own), _slot(own, shape.ranks_per_node), copies) for own in all_of]


def _slot(sizes: Sequence[int], ranks: int) -> int:
    # The records: the begin of the save, its digests, and each rank's list of its files.
    records = PAGE + pages(ENTRY * len(sizes)) + ranks * pages(ENTRY * max(1, len(sizes) // ranks))
    return sum(map(pages, sizes)) + records


@dataclass(frozen=True)
class MemoryLimits:
    """Limits in bytes that a container of one node needs, in addition to their other contents.

    Attributes:
        slots: Slots of the arena.
        arena: Bytes of the arena.
        tmpfs: The size of the tmpfs, with room for data loaders: as much as docker gives them by default.
        shm: The same in a round number of MiB.
    """

    slots: int
    arena: int
    tmpfs: int
    shm: int

    def cgroup(self, processes: int) -> int:
        """Bytes of memory of the whole container: pages of a tmpfs count, and so do the processes' own."""
        return limit_for(-(-self.arena // self.slots), self.slots, processes)

    @property
    def docker(self) -> str:
        """The option of docker run."""
        return f"--shm-size={self.shm}m"

    @property
    def kubernetes(self) -> str:
        """The volume of a pod, which is to be mounted at /dev/shm."""
        return f"emptyDir: {{medium: Memory, sizeLimit: {self.shm}Mi}}"


def limits(node: NodeImages, shape: JobShape, slots: int) -> MemoryLimits:
    """The limits for the node with the most."""
    arena = node.arena(slots, shape.ranks_per_node)
    tmpfs = arena + RESERVE  # a share of a small one would be less than a batch
    return MemoryLimits(slots, arena, tmpfs, round_mebibytes(tmpfs))


def round_mebibytes(size: int) -> int:
    """MiB that hold so many bytes, rounded up to four binary digits: by an eighth at most."""
    mebibytes = max(1, -(-size >> 20))
    unit = 1 << max(0, mebibytes.bit_length() - 4)
    return -(-mebibytes // unit) * unit
