"""What the files of a checkpoint are called that a rank or a node has of its own."""

from fastckpt._core.format.manifest import OF_NODE


def own_of(rank: int) -> str:
    """What a rank has beside what ranks have in common, and its random generators."""
    return f"rank_{rank}.pt"


def shards_of(rank: int) -> str:
    """What a rank has written."""
    return f"__{rank}_0.distcp"


def copies_of(rank: int) -> str:
    """What a rank has written of what ranks of other nodes have written, too, so that its node has it."""
    return f"{OF_NODE}rank_{rank}.distcp"


def index_of(node: int) -> str:
    """Where a node has copies of what `.metadata` has on others: a pickle like the one in there."""
    return f"{OF_NODE}{node}.metadata"
