"""Groups of nodes that hold something for each other, across failure domains, as stable as can be.

Groups instead of a ring: two lost nodes lose data only if they are of one group (Z. Wang et al., GEMINI, SOSP 2023,
section 4.1). Nodes that are lost together, such as those of one host or rack, are a failure domain.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastckpt.errors import ConfigError


@dataclass(frozen=True)
class ReplicaNode:
    """A node that takes part.

    Attributes:
        id: Its name, which it keeps from round to round.
        domain: Failure domain: all in it are lost together.
        partners: The other nodes of its group in the last round, whether they are there or not.
    """

    id: str
    domain: str
    partners: tuple[str, ...] = field(default=())


Group = tuple[str, ...]
"""The ids of the nodes of a group, in order."""


def grouped(nodes: Sequence[ReplicaNode], size: int) -> tuple[Group, ...]:
    """Groups of ``size`` nodes, and of up to ``2 * size - 1`` where the number of nodes makes it necessary.

    Every agent finds the same ones, in O(n log n) steps. A group of the last round stays if all its nodes are there and
    it has the needed size. Of two nodes in one domain one is exchanged with a node of another group.

    Args:
        nodes: In any order.
        size: Nodes of a group, at least; all nodes are one group if there are fewer.

    Raises:
        ConfigError: The size is less than 2, or two nodes have one id.
    """
    known = {node.id: node for node in nodes}
    if size < 2 or len(known) < len(nodes):
        raise ConfigError(f"groups of {size} of {len(nodes)} nodes; give a size of 2 or more, and ids that differ")
    if len(known) < 2 * size:
        return (tuple(sorted(known)),) if known else ()
    groups = _kept(known, size)
    free = sorted(known.keys() - {id for group in groups for id in group})
    groups += _spread([known[id] for id in free], size) if len(free) >= size else []
    grouped_ids = {id for group in groups for id in group}
    left = [id for id in free if id not in grouped_ids]
    _join(groups, left, known)
    _exchange(groups, known)
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _kept(known: dict[str, ReplicaNode], size: int) -> list[list[str]]:
    """The groups of the last round of which enough nodes are there; surplus nodes of one are free."""
    groups, seen = list[list[str]](), set[str]()
    for id in sorted(known):
        if id in seen:
            continue
        group = sorted({id, *(other for other in known[id].partners if other in known and other not in seen)})
        seen |= set(group)
        if len(group) < size:
            continue
        # Of a group with too many, those stay that are in domains of their own.
        domains, first = set[str](), list[str]()
        for each in group:
            if known[each].domain not in domains:
                domains.add(known[each].domain)
                first.append(each)
        rest = [each for each in group if each not in first]
        groups.append([*first, *rest][:size])
    return groups


def _spread(free: Sequence[ReplicaNode], size: int) -> list[list[str]]:
    """Groups of free nodes, of which no two are in one domain unless one domain has too many."""
    count = len(free) // size
    counts = Counter(node.domain for node in free)
    order = sorted(free, key=lambda node: (-counts[node.domain], node.domain, node.id))
    taken = order[: count * size]
    # Nodes of a domain stand together: with a stride of as many as there are groups they come into different ones.
    return [[node.id for node in taken[number::count]] for number in range(count)]


def _join(groups: list[list[str]], left: Sequence[str], known: dict[str, ReplicaNode]) -> None:
    """Add nodes that are too few for a group to groups, one to each: to a partner's, else to one elsewhere."""
    has_room = deque(range(len(groups)))
    of = {id: number for number, group in enumerate(groups) for id in group}
    grown = set[int]()
    for id in left:
        partners = [of[other] for other in known[id].partners if other in of and of[other] not in grown]
        number = next(iter(partners), None)
        if number is None:
            for _ in range(len(has_room)):
                number = has_room[0]
                has_room.rotate(-1)
                if number not in grown and all(known[each].domain != known[id].domain for each in groups[number]):
                    break
        assert number is not None
        grown.add(number)
        if len(grown) == len(groups):
            grown.clear()
        groups[number].append(id)
        of[id] = number


def _exchange(groups: list[list[str]], known: dict[str, ReplicaNode]) -> None:
    """Exchange nodes that are in one domain with another of their group, where another group allows it."""
    domains = [Counter(known[id].domain for id in group) for group in groups]
    # For each domain the groups are passed once: one that did not fit for a node of it does not fit for the next.
    passed = Counter[str]()
    for number, group in enumerate(groups):
        for place, id in enumerate(group):
            domain = known[id].domain
            while domains[number][domain] > 1 and passed[domain] < len(groups):
                other = passed[domain]
                passed[domain] += 1
                if other == number or domains[other][domain]:
                    continue
                fits = ((at, each) for at, each in enumerate(groups[other]) if not domains[number][known[each].domain])
                if (found := next(fits, None)) is None:
                    continue
                at, each = found
                group[place], groups[other][at] = each, id
                for which, gone, come in ((number, domain, known[each].domain), (other, known[each].domain, domain)):
                    domains[which][gone] -= 1
                    domains[which][come] += 1
                break
