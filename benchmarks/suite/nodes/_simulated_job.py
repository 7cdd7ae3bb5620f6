"""A large job under a scheme of copies, simulated by the product's own rules.

A job trains on nodes of 16 GPUs for so many days. Failures of hosts, links and processes arrive at random; each costs a
restart, the work since the newest save that is left, and, without a spare, the time until another host is there, or the
link. Which node holds whose copies (`place`, `grouped`), how often is saved (`fit`), who is to blame
(`collect_faults`), is left out (`leave_out`) and takes which rank (`assign_ranks`) are the product's own functions;
all else is in `Assumed`, each with its source.
"""

import random
from dataclasses import dataclass, field
from math import ceil, inf, log, sqrt

from fastckpt._core.policy.frequency.intervals import Costs, Intervals, fit
from fastckpt._core.policy.replicas.grouping import Group, ReplicaNode, grouped
from fastckpt._core.policy.replicas.placement import Placement, place
from fastckpt_run.rendezvous.membership import Node, NodeLimits, Round, assign_ranks, collect_faults, leave_out

GPUS = 16
"""GPUs of a node."""
DAY = 86400.0


@dataclass(frozen=True)
class Assumed:
    """Assumptions of the simulation.

    Attributes:
        failures: Failures of a node in a day: 419 interruptions of 2,048 nodes in 54 days (Llama 3, arXiv 2407.21783,
            section 3.3.4); Meta's clusters had 2.34 and 6.5 per thousand (arXiv 2410.21680).
        hosts: The part of them that takes a host away: 321 of these 419 were of hardware or its maintenance (table 5).
        links: The part of them that cuts a host off, with its memory: 35 of these 419 were of switches and cables (the
            same table). What is left are failures of processes.
        worst: The part of the nodes that have half of all failures, where failures have a heavy tail: 3 of 63
            (arXiv 2605.09370).
        replacement: Seconds until another host takes the place of one that is lost, if no spare waits: the median time
            between two automatic tries (arXiv 2605.09370).
        repair: Seconds until a lost host can be a spare again. No source: a day.
        link: Seconds until a link carries again. No source: half of `replacement`.
        restart: Seconds from a failure to the first step on nodes that are there, without loading: most is the start of
            processes and of the communication between GPUs. No source: the same for all schemes.
        iteration: Seconds of a step. No source.
        state: Bytes of a node's part of the state: 4 GB a GPU at most (arXiv 2407.21783, section 3.3.1).
        snapshot: Seconds by which a save to memory delays training: its copy from the GPUs at 20 GB/s each.
        storage: Bytes a second that storage takes and gives for each node: 2 TB/s for 16,384 GPUs (the same section).
        storage_limit: Bytes a second that it takes and gives for all nodes; infinite if it grows with the cluster.
        network: Bytes a second of a copy to another node: 10 Gb/s, what one core receives (docs/evidence).
        overhead: The part of the time that saves may cost, as `--fast-overhead` has it.
    """

    failures: float = 419 / 54 / 2048
    hosts: float = 321 / 419
    links: float = 35 / 419
    worst: float = 3 / 63
    replacement: float = 11 * 60.0
    repair: float = DAY
    link: float = 5.5 * 60
    restart: float = 60.0
    iteration: float = 5.0
    state: float = 64e9
    snapshot: float = 0.2
    storage: float = 2e12 / 1024
    storage_limit: float = inf
    network: float = 1.25e9
    overhead: float = 0.01


@dataclass(frozen=True)
class Case:
    """A panel of the picture: what is taken for granted, and whether few hosts have most failures."""

    title: str
    assumed: Assumed
    heavy: bool = False


HOST, LINK, PROCESS = "host", "link", "process"
"""Kinds of failures: of a host, with its memory; of the link of one; of a process, which leaves memory as it is."""

CASES = (
    Case("storage grows with the job", Assumed()),
    # 16% of 250 GB/s in bursts of saves on 63 nodes (arXiv 2605.09370, version 5).
    Case("storage of 40 GB/s in all", Assumed(storage_limit=40e9)),
    Case("the same, few hosts have half of all failures", Assumed(storage_limit=40e9), heavy=True),
)


@dataclass(frozen=True)
class Scheme:
    """One way to keep a job's state.

    Attributes:
        memory: True if saves go to memory between those to storage; else training waits for each save to storage.
        copies: Other nodes that hold a node's files.
        parity: Nodes of a group with XOR parity; 0 for none.
        spares: Hosts that wait, as a part of the job's nodes.
        exclude: Failures of a host alone after which a host is left out while a spare waits; 0 for never.
    """

    title: str
    memory: bool = True
    copies: int = 0
    parity: int = 0
    spares: float = 0.0
    exclude: int = 0


SPARES = 1 / 64
SCHEMES = (
    Scheme("storage alone", memory=False),
    Scheme("memory"),
    Scheme("memory, one copy", copies=1),
    Scheme("memory, two copies", copies=2),
    Scheme("memory, XOR of 4", parity=4),
    Scheme("memory, XOR of 8", parity=8),
    Scheme("memory, spares", spares=SPARES),
    Scheme("memory, one copy, spares", copies=1, spares=SPARES),
    Scheme("memory, one copy, spares, exclusion", copies=1, spares=SPARES, exclude=2),
)


@dataclass
class Host:
    """A host: how often it fails, and what became of it.

    Attributes:
        rate: Failures in a second.
        is_bad: True if it is one of the few that have most failures: those of its processes are its own, then.
        until: Time at which it, or its link, is repaired.
    """

    name: str
    rate: float
    is_bad: bool = False
    until: float = 0.0


@dataclass
class Outcome:
    """Result of a simulated job.

    Attributes:
        useful: The part of the time in steps that were done for the first time.
        failures: Their number.
        by_source: Number of times that the job went on from memory, from copies and from storage.
    """

    useful: float = 0.0
    failures: int = 0
    by_source: dict[str, int] = field(default_factory=lambda: {"memory": 0, "copies": 0, "storage": 0})


class SimulatedJob:
    """One job; all that is random comes from its generator."""

    def __init__(self, nodes: int, scheme: Scheme, case: Case, seed: int) -> None:
        self._random, self._scheme, self._assumed = random.Random(seed), scheme, case.assumed
        assumed = case.assumed
        self._to_storage = assumed.state / min(assumed.storage, assumed.storage_limit / nodes)
        """Seconds until all nodes' parts of a state are on storage, or are read from it."""
        spares = ceil(scheme.spares * nodes)
        rates = _rates(nodes + spares, case)
        self._random.shuffle(rates)
        least = min(rates)
        hosts = [Host(f"host{number:04}", rate / DAY, rate > least) for number, rate in enumerate(rates)]
        self._hosts = {host.name: host for host in hosts}
        self._round = Round(1, "1", tuple(_node(host.name) for host in hosts[:nodes]))
        self._spares = [host.name for host in hosts[nodes:]]
        self._limits = NodeLimits(nodes, nodes, spares=spares, exclude_after=scheme.exclude)
        self._lost = set[str]()
        self._placement = Placement({}, 0, ())
        self._groups: tuple[Group, ...] = ()
        self._place()
        self._copied()
        self._intervals = _intervals(scheme, assumed, self._to_storage, nodes)
        self._complete_at = 0.0
        """Time at which the last host is there that takes the place of a lost one."""

    def run(self, seconds: float) -> Outcome:
        """Train for so long; what it came to."""
        now = done = 0.0
        found = Outcome()
        while now < seconds:
            failed, at = self._next_failure(now)
            if at >= seconds:
                done += self._worked(seconds - now)
                break
            worked = self._worked(at - now)
            source, kept = self._fail(failed, at, at - now, worked)
            done += kept
            found.failures += 1
            found.by_source[source] += 1
            now = at + self._until_it_goes_on(source, at)
        found.useful = done / seconds
        return found

    def _next_failure(self, now: float) -> tuple[str, float]:
        names = [node.host for node in self._round.nodes]
        rates = [self._hosts[name].rate for name in names]
        at = now - log(1 - self._random.random()) / sum(rates)
        return self._random.choices(names, rates)[0], at

    def _worked(self, seconds: float) -> float:
        """Seconds of steps in so many seconds without a failure."""
        return seconds / (1 + self._overhead())

    def _overhead(self) -> float:
        assumed = self._assumed
        if not self._scheme.memory:
            return self._to_storage / (self._intervals.storage * assumed.iteration)
        return assumed.snapshot / (self._intervals.memory * assumed.iteration)

    def _fail(self, name: str, at: float, since: float, worked: float) -> tuple[str, float]:
        """Whence the job goes on, and the seconds of work since its start that are left."""
        # Copies are whole again once the first save after a start is at all partners: until then a second loss counts
        # together with the first.
        if since > self._lag() + self._intervals.memory * self._assumed.iteration:
            self._copied()
        kind = self._kind()
        self._take_back(at)
        is_out = kind == HOST or (kind == LINK and bool(self._spares))
        if is_out:
            self._hosts[name].until = at + (self._assumed.link if kind == LINK else self._assumed.repair)
        elif kind == LINK:  # all wait for it: what the host has in memory is there then
            self._complete_at = at + self._assumed.link
        before = self._round.ranks.keys()
        self._meet(name, at, is_out=is_out, is_process=kind == PROCESS)
        self._lost |= before - self._round.ranks.keys()  # also who is left out: its rank goes to one without its memory
        if self._scheme.memory and not self._lost:
            return "memory", self._left(worked, 0.0, self._intervals.memory)
        if self._lost and self._scheme.memory and self._survives():
            lag = self._lag()
            interval = max(self._intervals.memory, ceil(lag / self._assumed.iteration))
            return "copies", self._left(worked, lag, interval)
        self._copied()  # all that counts is durable
        durable_after = self._to_storage if self._scheme.memory else 0.0
        return "storage", self._left(worked, durable_after, self._intervals.storage)

    def _copied(self) -> None:
        """Take note that all nodes of the round have a save, and its copies."""
        self._lost.clear()
        self._copied_in = self._placement, self._groups

    def _survives(self) -> bool:
        """Return whether the newest save with all its copies is whole, on the nodes that had it."""
        placement, groups = self._copied_in
        if self._scheme.parity:
            return all(sum(name in self._lost for name in group) <= 1 for group in groups)
        return bool(self._scheme.copies) and placement.survives(self._lost & placement.holders.keys())

    def _left(self, worked: float, lag: float, interval: int) -> float:
        """Return the part of the work since the start that the newest save has that was whole `lag` seconds ago."""
        step = interval * self._assumed.iteration
        return max(0.0, (worked - lag) // step * step)

    def _lag(self) -> float:
        """Seconds from a save to its copies at all partners."""
        assumed, scheme = self._assumed, self._scheme
        return assumed.state * max(1, scheme.copies) / assumed.network

    def _until_it_goes_on(self, source: str, at: float) -> float:
        assumed, scheme = self._assumed, self._scheme
        load = {"memory": 0.0, "copies": assumed.state / assumed.network, "storage": self._to_storage}[source]
        if source == "copies" and scheme.parity:
            load *= 2  # a chain of partial sums, and the last hop
        return max(0.0, self._complete_at - at) + assumed.restart + load

    def _kind(self) -> str:
        """Draw the kind of a failure."""
        hosts, links = self._assumed.hosts, self._assumed.links
        return self._random.choices((HOST, LINK, PROCESS), (hosts, links, 1 - hosts - links))[0]

    def _take_back(self, at: float) -> None:
        """Have hosts that are repaired wait as spares."""
        for each in self._hosts.values():
            if 0 < each.until <= at:
                each.until = 0.0
                if self._scheme.spares:
                    self._spares.append(each.name)

    def _meet(self, failed: str, at: float, *, is_out: bool, is_process: bool) -> None:
        """Hold the next round as agents do: without a host that is out, or that fails too often while a spare waits."""
        # A bug of the script is nobody's: it hits more than one host sooner or later.
        fault = f"fault of {failed}" if self._hosts[failed].is_bad else "a bug"
        gone = frozenset({failed} if is_out else ())
        came = [node for node in self._round.nodes if node.id not in gone]
        came = [node._replace(fault=fault) if is_process and node.id == failed else node for node in came]
        came += map(_node, self._spares)
        if len(came) < self._limits.most:
            fresh = Host(f"{failed}-{at:.0f}", self._assumed.failures / DAY)
            self._hosts[fresh.name] = fresh
            self._complete_at = at + self._assumed.replacement
            came.append(_node(fresh.name))
        faults = collect_faults(self._round, came, gone)
        chosen, _ = leave_out(self._round, came, faults, self._limits)
        nodes = tuple(_node(node.host) for node in assign_ranks(self._round, chosen, self._limits.most))
        number, before = self._round.number + 1, self._round
        self._round = Round(number, str(number), nodes, faults=faults)
        self._spares = [node.host for node in came if node.host not in self._round.ranks]
        if before.ranks.keys() != self._round.ranks.keys():
            self._place()

    def _place(self) -> None:
        before = self._groups
        partners = {name: tuple(other for other in group if other != name) for group in before for name in group}
        known = [ReplicaNode(node.host, node.host, partners.get(node.host, ())) for node in self._round.nodes]
        self._groups = grouped(known, self._scheme.parity or max(1, self._scheme.copies) + 1)
        self._placement = place(known, self._scheme.copies)


def _node(name: str) -> Node:
    return Node(name, name, name, {})


def _rates(count: int, case: Case) -> list[float]:
    """Failures of each host in a day."""
    assumed = case.assumed
    if not case.heavy:
        return [assumed.failures] * count
    bad = max(1, round(count * assumed.worst))
    total = assumed.failures * count
    return [total / 2 / bad] * bad + [total / 2 / max(1, count - bad)] * (count - bad)


def _intervals(scheme: Scheme, assumed: Assumed, persist: float, nodes: int) -> Intervals:
    """Steps between saves; training waits for those of the scheme without memory, at the best interval for that."""
    if not scheme.memory:
        between = DAY / (assumed.failures * nodes)
        steps = ceil(sqrt(2 * persist * between) / assumed.iteration)  # J. W. Young, CACM 17(9), 1974
        return Intervals(steps, steps)
    return fit(Costs(assumed.iteration, assumed.snapshot, 0.0, persist), assumed.overhead)
