"""Bytes that copies of other nodes' files take."""

import math
from collections.abc import Iterable

SMALL = 16 << 20
"""Bytes that a file may have at most that counts as small: it goes to others with the records of its save."""
PLACES = 2
"""Saves of which a node keeps copies: the newest that all have, and the one that comes."""


def room(sizes: Iterable[int], copies: float) -> int:
    """Bytes of copies on each node, if each alone has files of these sizes, and others keep so many copies of them."""
    return math.ceil(PLACES * copies * sum(size for size in sizes if size > SMALL))
