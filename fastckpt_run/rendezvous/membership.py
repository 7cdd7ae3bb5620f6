"""Membership of a round: its nodes, their group ranks, and when the round is complete. Pure functions."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

from fastckpt._core.memory.processes import Process
from fastckpt._core.policy.hosts.host_exclusion import HostFaults, suspects, with_faults
from fastckpt_run.rendezvous.job_terms import UNKNOWN, JobTerms, common, misfit


class Node(NamedTuple):
    """An agent that takes part in a rendezvous.

    Attributes:
        id: A random word, drawn by each agent process.
        host: The name of its host.
        address: The address by which other nodes reach it.
        process: Its process, as `Process.to_record` describes it.
        fault: Reason why its workers failed in the last round, if its host may be to blame; empty else.
        is_checked: True if it has taken part in no round yet, and its host has passed the node check.
        terms: Terms that it must share with the others; not known of a node of a round, which has them for all.
        domain: Failure domain of its host, such as a rack; empty if it was not given.
    """

    id: str
    host: str
    address: str
    process: Mapping[str, Any]
    fault: str = ""
    is_checked: bool = False
    terms: JobTerms = UNKNOWN
    domain: str = ""

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object."""
        return self._asdict() | {"terms": self.terms.to_record()}

    @classmethod
    def from_record(cls, record: Any) -> Self:
        """Raises ValueError if ``record`` describes no node."""
        # Each agent reads a record of each node in each round: no pattern, which takes five times as long.
        try:
            id, host, address, process = (record[name] for name in cls._fields[:4])
            fault, is_checked = record.get("fault", ""), record.get("is_checked", False)
            domain = record.get("domain", "")
        except (KeyError, TypeError, AttributeError):
            raise ValueError("it describes no node") from None
        is_text = type(id) is type(host) is type(address) is type(fault) is type(domain) is str
        if not (is_text and type(process) is dict and type(is_checked) is bool):
            raise ValueError("it describes no node")
        terms = JobTerms.from_record(given) if (given := record.get("terms")) else UNKNOWN
        return cls(id, host, address, process, fault, is_checked, terms, domain)

    def is_dead_here(self) -> bool:
        """True if it was a process of this host, in this boot, that has ended."""
        process = Process.from_record(dict(self.process))
        return process is not None and process.is_dead()


@dataclass(frozen=True)
class Round:
    """A complete round.

    Attributes:
        number: The number of rounds that the job has had, with this one.
        name: A random word: rounds of two halves of a job may have one number, but not one name.
        nodes: The nodes by their group ranks.
        is_closed: True if the job was ended: no round follows.
        ending: The host that ended it, and why, in words; empty if that is not known.
        faults: Causes of failures in all rounds before, by host, so that a host can be left out that fails too often.
        terms: Terms that its nodes share, and shared in earlier rounds, each with a node of the next.
        drained: Names of hosts that are left out until somebody takes them back in. Each has that of a host which it
            does not reach, if that is why: without that one it is not left out; else an empty text.
    """

    number: int
    name: str
    nodes: tuple[Node, ...] = ()
    is_closed: bool = False
    faults: HostFaults = field(default_factory=dict)
    ending: str = ""
    terms: JobTerms = UNKNOWN
    drained: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        """Group ranks by the ids of nodes."""
        return {node.id: rank for rank, node in enumerate(self.nodes)}

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object."""
        # Whether one host is left out for the sake of another goes by their order, which an object would not keep.
        lists = {"nodes": [node.to_record() for node in self.nodes], "drained": [*map(list, self.drained.items())]}
        return asdict(replace(self, nodes=())) | lists | {"terms": self.terms.to_record()}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Raises ValueError if ``record`` describes no round."""
        match record:
            case {"number": int(number), "name": str(name), "nodes": list(nodes), "is_closed": bool(is_closed)}:
                faults, ending = faults_in(record.get("faults", {})), str(record.get("ending", ""))
                terms, found = JobTerms.from_record(record.get("terms")), tuple(map(Node.from_record, nodes))
                if isinstance(drained := record.get("drained", []), list):
                    drained = {str(host): str(other) for host, other in drained}
                    return cls(number, name, found, is_closed, faults, ending, terms, drained)
        raise ValueError("it describes no round")


def faults_in(record: Any) -> dict[str, tuple[str, ...]]:
    """The faults of hosts in a JSON object; raises ValueError if ``record`` has none."""
    if not (type(record) is dict and all(type(causes) in (list, tuple) for causes in record.values())):
        raise ValueError("it describes no faults of hosts")
    return {host: tuple(map(str, causes)) for host, causes in record.items()}


def left_out_of(drained: Mapping[str, str], hosts: Collection[str]) -> frozenset[str]:
    """The drained hosts that a round has no place for, if the nodes on some ``hosts`` can take part in it."""
    out = {host for host, other in drained.items() if not other}
    for host, other in reversed([*drained.items()]):  # an earlier one may have been for the sake of a later one
        out |= {host} if other in hosts and other not in out else set()
    return frozenset(out)


@dataclass(frozen=True)
class Master:
    """Meeting point of the agents and workers of a round: the agent of rank 0.

    Attributes:
        address: Its address.
        port: The port of the agents' store.
        workers_port: The port of the workers' store, which may be the same.
        holder: The id of the agent that holds the store of the rendezvous; empty if it is none of the job.
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
    """Numbers of nodes that a round may have, and seconds that its completion waits for more than the fewest.

    Attributes:
        spares: Nodes that may wait, in addition to the most.
        exclude_after: Failures of a host alone after which it is left out while a spare waits; 0 for any number.
    """

    fewest: int
    most: int
    last_call: float = 30.0
    spares: int = 0
    exclude_after: int = 0

    @property
    def needed(self) -> str:
        """Number of nodes that a round needs, in words."""
        return str(self.fewest) if self.fewest == self.most else f"at least {self.fewest}"


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
        limits: Limits on the number of nodes.
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


def fitting(last: Round, present: Sequence[Node]) -> list[Node]:
    """The nodes that may take part together: if a member of the last round is there, those that fit its terms."""
    if all(node.id not in last.ranks for node in present):
        return [*present]
    return [node for node in present if node.id in last.ranks or not misfit(node.terms, last.terms)]


def terms_of(last: Round, nodes: Sequence[Node]) -> JobTerms:
    """The terms that these nodes share, and shared in the last round if one was in it."""
    known = [last.terms] if any(node.id in last.ranks for node in nodes) else []
    return common([*known, *(node.terms for node in nodes)])


def _address_of(node: Node) -> Hashable:
    return node.host, node.address


def _host_of(node: Node) -> Hashable:
    return node.host  # it may come back with another address


def _domain_of(node: Node) -> Hashable:
    return node.domain


_KINSHIP = _address_of, _host_of, _domain_of
"""Relations by which a newcomer is given the rank of a lost node, the nearest first."""


def assign_ranks(last: Round, present: Sequence[Node], most: int) -> tuple[Node, ...]:
    """The nodes that take part in the next round, by their group ranks.

    Nodes of the last round keep their ranks, because their memory and their part of the state belong to these. A rank
    that became free goes to a newcomer from the host that had it, then to one of its domain, then to others. Without
    newcomers, the nodes with the highest ranks take it. A first round goes by domains, the names of hosts and
    addresses: so the ranks of a rack follow each other.

    Args:
        last: The last round.
        present: The nodes that are there, in the order in which they came.
        most: The largest number of nodes.
    """
    ranks = last.ranks
    survivors = sorted((node for node in present if node.id in ranks), key=lambda node: ranks[node.id])[:most]
    newcomers = [node for node in present if node.id not in ranks]
    placed = {ranks[node.id]: node for node in survivors}
    free = {rank: node for rank, node in enumerate(last.nodes) if rank not in placed}
    lost = [{*map(key, free.values())} - {""} for key in _KINSHIP]
    # Stable: otherwise the first to come.
    newcomers.sort(key=lambda node: [key(node) not in had for key, had in zip(_KINSHIP, lost, strict=True)])
    newcomers = sorted(newcomers[: most - len(survivors)], key=lambda node: (node.domain, node.host, node.address))
    count = len(survivors) + len(newcomers)
    # A node that must move gets the lowest free rank; newcomers of a host get the rank that this host had.
    placed = {rank: node for rank, node in placed.items() if rank < count}
    holes = [rank for rank in range(count) if rank not in placed]
    given = set[str]()
    for key in _KINSHIP:
        had = dict[Hashable, list[int]]()
        for rank in reversed(holes):
            if rank in free and rank not in placed:
                had.setdefault(key(free[rank]), []).append(rank)
        had.pop("", None)  # a domain that was not given
        for node in newcomers:
            if node.id not in given and (left := had.get(key(node))):
                placed[left.pop()] = node
                given.add(node.id)
    holes = [rank for rank in holes if rank not in placed]
    newcomers = [node for node in newcomers if node.id not in given]
    moved = [node for node in survivors if ranks[node.id] >= count]
    placed |= dict(zip(holes, [*moved, *newcomers], strict=True))
    return tuple(placed[rank] for rank in range(count))


def collect_faults(last: Round, came: Collection[Node], gone: Collection[str]) -> HostFaults:
    """The faults of hosts up to the end of the last round.

    Args:
        last: The last round.
        came: The nodes that came to the next one: they know the failures of their workers.
        gone: The ids of nodes that are gone, but for those that left in good order. Hosts that are lost in one round
            share the cause.
    """
    fresh = {node.host for node in came if node.is_checked and node.id not in last.ranks}
    known = {host: causes for host, causes in last.faults.items() if host not in fresh}
    # One for each host: the fault that kills a worker may kill its agent, too.
    found = {node.host: f"lost in round {last.number}" for node in last.nodes if node.id in gone}
    found |= {node.host: node.fault for node in came if node.fault and node.id in last.ranks}
    return with_faults(known, found.items())


def leave_out(
    last: Round, present: Sequence[Node], faults: HostFaults, limits: NodeLimits
) -> tuple[list[Node], list[Node]]:
    """The nodes that may take part in the next round, and those that are left out for others that wait.

    Args:
        last: The last round.
        present: The nodes that are there, in the order in which they came.
        faults: Faults of all hosts.
        limits: Limits on the number of nodes, and on a host's failures.
    """
    bad = suspects(faults, limits.exclude_after) if limits.spares else frozenset[str]()
    good = [node for node in present if node.host not in bad]
    doubtful = sorted(
        (node for node in present if node.host in bad),
        key=lambda node: (len(faults[node.host]), node.id not in last.ranks),
    )
    needed = max(0, limits.most - len(good))
    return [*good, *doubtful[:needed]], doubtful[needed:]
