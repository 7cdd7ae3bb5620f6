"""Membership of a round: who takes part, with which group rank, and when the round is complete. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

from fastckpt._core.memory.processes import Process


class Node(NamedTuple):
    """An agent that takes part in a rendezvous.

    Attributes:
        id: A random word, drawn by each agent process.
        host: The name of its host.
        address: The address by which other nodes reach it.
        process: Its process, as `Process.to_record` describes it.
    """

    id: str
    host: str
    address: str
    process: Mapping[str, Any]

    def to_record(self) -> dict[str, Any]:
        """As a JSON object."""
        return self._asdict()

    @classmethod
    def from_record(cls, record: Any) -> Self:
        """Raises ValueError if ``record`` describes no node."""
        # Each agent reads a record of each node in each round: no pattern, which takes five times as long.
        try:
            id, host, address, process = (record[name] for name in cls._fields)
        except (KeyError, TypeError):
            raise ValueError("it describes no node") from None
        if not (type(id) is type(host) is type(address) is str and type(process) is dict):
            raise ValueError("it describes no node")
        return cls(id, host, address, process)

    def is_dead_here(self) -> bool:
        """Whether it was a process of this host, in this boot, that has ended."""
        process = Process.from_record(dict(self.process))
        return process is not None and process.is_dead()


@dataclass(frozen=True)
class Round:
    """A complete round.

    Attributes:
        number: The number of rounds that the job has had, with this one.
        name: A random word: rounds of two halves of a job may have one number, but not one name.
        nodes: The nodes by their group ranks.
        is_closed: Whether the job was ended: no round follows.
    """

    number: int
    name: str
    nodes: tuple[Node, ...] = ()
    is_closed: bool = False

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        """Group ranks by the ids of nodes."""
        return {node.id: rank for rank, node in enumerate(self.nodes)}

    def to_record(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(replace(self, nodes=())) | {"nodes": [node.to_record() for node in self.nodes]}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Raises ValueError if ``record`` describes no round."""
        match record:
            case {"number": int(number), "name": str(name), "nodes": list(nodes), "is_closed": bool(is_closed)}:
                return cls(number, name, tuple(Node.from_record(node) for node in nodes), is_closed)
        raise ValueError("it describes no round")


@dataclass(frozen=True)
class Master:
    """Where the agents and the workers of a round meet: at the agent of rank 0.

    Attributes:
        address: Its address.
        port: The port of the agents' store.
        workers_port: The port of the workers' store, which may be the same.
        holder: The id of the agent whose process holds the store of the rendezvous; empty if it is none of the job.
    """

    address: str
    port: int
    workers_port: int
    holder: str = ""

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Raises ValueError if ``record`` describes no such place."""
        match record:
            case {"address": str(address), "port": int(port), "workers_port": int(workers), "holder": str(holder)}:
                return cls(address, port, workers, holder)
        raise ValueError("it describes no place to meet")


BEFORE_THE_FIRST = Round(0, "first")
"""The round that was before the first one: nobody took part."""


@dataclass(frozen=True)
class NodeLimits:
    """Numbers of nodes that a round may have, and seconds that its completion waits for more than the fewest."""

    fewest: int
    most: int
    last_call: float = 30.0


def is_complete(
    last: Round, present: Sequence[Node], gone: frozenset[str], limits: NodeLimits, since_fewest: float
) -> bool:
    """Return whether a round need not wait any longer.

    A round that continues another one waits for the living nodes of that: they come at once, or are found to be gone.
    Only a first one waits for nodes of which nothing is known.

    Args:
        last: The last round.
        present: The nodes that are there.
        gone: Ids of nodes of the last round that are known to be gone.
        limits: How many nodes there may be.
        since_fewest: Seconds since the fewest nodes were there.
    """
    if len(present) < limits.fewest:
        return False
    here = {node.id for node in present}
    if any(id not in gone and id not in here for id in last.ranks):
        return False
    if any(node.id in last.ranks for node in present):
        return True
    return len(present) >= limits.most or since_fewest >= limits.last_call


def assign_ranks(last: Round, present: Sequence[Node], most: int) -> tuple[Node, ...]:
    """The nodes that take part in the next round, by their group ranks.

    Nodes of the last round keep their ranks, because their memory and their part of the state belong to these. A rank
    that became free goes to a newcomer from the host that had it, then to other newcomers; without newcomers, to the
    nodes with the highest ranks. A first round goes by the names of hosts and by addresses.

    Args:
        last: The last round.
        present: The nodes that are there, in the order in which they came.
        most: The largest number of nodes.
    """
    ranks = last.ranks
    survivors = sorted((node for node in present if node.id in ranks), key=lambda node: ranks[node.id])[:most]
    newcomers = [node for node in present if node.id not in ranks]
    placed = {ranks[node.id]: node for node in survivors}
    free = {rank: (node.host, node.address) for rank, node in enumerate(last.nodes) if rank not in placed}
    newcomers.sort(key=lambda node: (node.host, node.address) not in free.values())  # stable: otherwise who came first
    newcomers = sorted(newcomers[: most - len(survivors)], key=lambda node: (node.host, node.address))
    count = len(survivors) + len(newcomers)
    # Who must move, moves to the lowest free rank; newcomers of a host get the rank that this host had.
    placed = {rank: node for rank, node in placed.items() if rank < count}
    holes = [rank for rank in range(count) if rank not in placed]
    for node in [*newcomers]:
        rank = next((rank for rank in holes if free.get(rank) == (node.host, node.address)), None)
        if rank is not None:
            placed[rank] = node
            holes.remove(rank)
            newcomers.remove(node)
    moved = [node for node in survivors if ranks[node.id] >= count]
    placed |= dict(zip(holes, [*moved, *newcomers], strict=True))
    return tuple(placed[rank] for rank in range(count))
