"""Names of the files of a checkpoint that belong to one rank or one node."""

from fastckpt._core.format.manifest import OF_NODE


def own_of(rank: int) -> str:
    """The file of a rank's own state and its random generators."""
    return f"rank_{rank}.pt"


def shards_of(rank: int) -> str:
    """The file of the shards that a rank has written."""
    return f"__{rank}_0.distcp"


def copies_of(rank: int) -> str:
    """The file of shards that ranks of other nodes have written as well, so that its node has them."""
    return f"{OF_NODE}rank_{rank}.distcp"


def index_of(node: int) -> str:
    """The file of a node's index: its own copies in place of other nodes' files; a pickle as `.metadata` has."""
    return f"{OF_NODE}{node}.metadata"
