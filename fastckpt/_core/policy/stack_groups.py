"""Groups of ranks that were caught at the same place when a job hung, the odd ones first, in a line for 1,000 ranks.

Stacks that are equal form a group, as in ByteRobust ("Robust LLM Training Infrastructure at ByteDance", SOSP 2025,
arXiv:2509.16293: stacks are aggregated by string matching; dominant groups are healthy, the rest are outliers). Which
of the groups is odd is decided by more than its size: by `hangs.culprits`, as within one node.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Self

from fastckpt._core.policy.hangs import Witness, culprits

MOST = 20
"""Groups that are kept; of the rest, how many there are."""
SHOWN = 4
"""Groups that the line names; and hosts of each."""
RANGES = 16
"""Ranges of ranks that are shown of a group."""
FRAMES = 100
"""Frames of a stack that are compared, the innermost first: as many as faulthandler writes."""
_LONGEST = 120
"""Characters of a frame."""
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3[^/]*/|/torch/|/fastckpt/_core/|^<frozen ")
"""Files that a script calls, rather than is."""
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_UNKNOWN = "gives no stack, and the others wait"


@dataclass(frozen=True)
class Frame:
    """Function, file and line at which a thread is."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"

    @property
    def name(self) -> str:
        """The frame without the parts that differ between hosts and processes: directories and addresses."""
        file = self.file.rpartition("/")[2]
        return _ADDRESS.sub("0x", f"{self.function} ({file}:{self.line})")[:_LONGEST]


def place_of(frames: Sequence[Frame]) -> str:
    """Return the place of a thread in its script, such as ``take (data.py:88)``; empty if it has no frames.

    In a library it is the function that the script has called, and where: ``all_reduce (train.py:40)``.

    Args:
        frames: Frames of the thread, the innermost first.
    """
    own = next((depth for depth, frame in enumerate(frames) if not _LIBRARY.search(frame.file)), 0)
    return replace(frames[own], function=frames[max(0, own - 1)].function).name if frames else ""


@dataclass(frozen=True)
class CaughtRank:
    """A rank of the job as its agent has found it.

    Attributes:
        witness: Facts on the rank.
        host: Host of the rank.
        frames: The stack of its main thread, the innermost frame first, as `Frame.name`; empty if it is not known.
        place: As `place_of`.
        in_collective: True if its stack is in a function in which ranks wait for each other, though it may compute.
    """

    witness: Witness
    host: str
    frames: tuple[str, ...] = ()
    place: str = ""
    in_collective: bool = False

    @property
    def state(self) -> str:
        """State of the ranks, one of `STATES`."""
        witness = self.witness
        if witness.state in _OF_KERNEL:
            return _OF_KERNEL[witness.state]
        if witness.has_left:
            return "left" if witness.state else "exited"
        if witness.goes_on:
            return "goes_on"
        if not self.frames:
            return "unknown"
        return "waits" if witness.waits else "computes" if self.in_collective else "elsewhere"


_OF_KERNEL = {"T": "stopped", "D": "uninterruptible"}
STATES: Mapping[str, tuple[str, str]] = {
    "stopped": ("is stopped (SIGSTOP)", "are stopped (SIGSTOP)"),
    "uninterruptible": ("waits in the kernel, uninterruptibly", "wait in the kernel, uninterruptibly"),
    "elsewhere": ("is in {}", "are in {}"),
    "computes": ("computes in {}", "compute in {}"),
    "unknown": ("gives no stack", "give no stack"),
    "exited": ("has exited", "have exited"),
    "left": ("has closed its checkpointer", "have closed their checkpointers"),
    "waits": ("waits in {}", "wait in {}"),
    "goes_on": ("goes on", "go on"),
}
"""Words for each state, for one rank and for several; ``{}`` is the place. The most suspicious state is first."""
_FOR_GOOD = {"exited", "waits"}
"""States of ranks in a job that cannot go on.

A rank that seems to compute in a collective may be anywhere below it.
"""
_ORDER = {state: order for order, state in enumerate(STATES)}


@dataclass(frozen=True)
class StackGroup:
    """Ranks that were caught at the same place.

    Attributes:
        ranks: In order.
        hosts: Of these ranks, in order, each once.
        is_odd: True if these hold the others up.
        state: State of the ranks, one of `STATES`.
        place: Their place in the script; empty if it is not known.
        stack: Their frames, the innermost first.
        idle: Seconds for which none of them has done anything.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    is_odd: bool
    state: str
    place: str
    stack: tuple[str, ...] = ()
    idle: float = 0.0

    @property
    def name(self) -> str:
        """Name of the group, such as ``ranks 3,7 on hosts a and b``."""
        return f"{self.short_name} on {_listed(self.hosts)}"

    @property
    def short_name(self) -> str:
        """Name of the group without hosts."""
        return f"{'ranks' if len(self.ranks) > 1 else 'rank'} {ranges(self.ranks)}"

    @property
    def deed(self) -> str:
        """Description of the ranks' activity."""
        words = STATES[self.state][len(self.ranks) > 1]
        return words.format(self.place or "no Python function")

    def to_event(self) -> dict[str, Any]:
        """The fields of docs/reference/events.md."""
        fields = {"ranks": ranges(self.ranks), "count": len(self.ranks), "hosts": [*self.hosts[:SHOWN]]}
        return fields | {"odd": self.is_odd, "state": self.state, "place": self.place}


@dataclass(frozen=True)
class StackGroups:
    """All ranks of a job, grouped.

    Attributes:
        groups: At most `MOST`, the odd ones first, then the most suspicious, then the smallest.
        reason: Reason why the odd groups are odd, or why none is.
        world: Number of ranks in the job.
        unheard: Hosts whose agents gave no answer.
        missing: The ranks on these, as `ranges`.
        more: Number of other groups, and of their ranks.
    """

    groups: tuple[StackGroup, ...]
    reason: str
    world: int
    unheard: tuple[str, ...] = ()
    missing: str = ""
    more: tuple[int, int] = (0, 0)

    @property
    def odd(self) -> tuple[StackGroup, ...]:
        """The groups that hold the others up; none if that is not known."""
        return tuple(group for group in self.groups if group.is_odd)

    @property
    def places(self) -> frozenset[str]:
        """Places of the ranks that hold the others up; the places of all if these ranks are not known."""
        return frozenset(group.place for group in self.odd or self.groups)

    @property
    def idle(self) -> float:
        """Seconds for which those have done nothing that hold the others up; or all, if that is not known."""
        return min([group.idle for group in self.odd or self.groups], default=0.0)

    @property
    def is_for_good(self) -> bool:
        """True if all ranks that run wait for others, and some of the others have exited: this wait never ends."""
        states = {group.state for group in self.groups}
        return "exited" in states and states <= _FOR_GOOD and not (self.unheard or self.more[0])

    @property
    def line(self) -> str:
        """Return the finding in one line of bounded length."""
        named, counted = self.groups[:SHOWN], self.groups[SHOWN:]
        parts = []
        for number, group in enumerate(named):
            count = len(group.ranks)
            if number == 0:
                parts.append(f"{count} of {self.world} rank{'s' * (self.world > 1)}, {group.name}, {group.deed}")
            else:
                parts.append(f"{count if count > SHOWN else group.name} {group.deed}")
        places = len(counted) + self.more[0]
        if places:
            ranks = sum(len(group.ranks) for group in counted) + self.more[1]
            parts.append(f"{ranks} are in {places} other places")
        if self.unheard:
            agents = "the agent on" if len(self.unheard) == 1 else "the agents on"
            where = f" ({'rank' if self.missing.isdigit() else 'ranks'} {self.missing})" if self.missing else ""
            parts.append(f"{agents} {_listed(self.unheard)} gave no answer{where}")
        if not self.odd:
            parts.append(self.reason)
        elif self.odd[0].state in (
            "waits",
            "computes",
        ):  # as the others do: its place does not show its oddity
            parts.append(f"{self.odd[0].short_name} {self.reason}")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the finding in the form that `of_json` reads."""
        return asdict(self)

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Self:
        """Read another agent's message; raises LookupError, TypeError or ValueError if that is no groups."""
        groups = tuple(_group_of_json(group) for group in found["groups"][:MOST])
        texts, more = tuple(map(str, found["unheard"])), tuple(map(int, found["more"]))
        if len(more) != 2:
            raise ValueError(f"{more} is no pair")
        return cls(groups, str(found["reason"]), int(found["world"]), texts, str(found["missing"]), (more[0], more[1]))


def _group_of_json(found: Mapping[str, Any]) -> StackGroup:
    hosts, stack = (tuple(map(str, found[name])) for name in ("hosts", "stack"))
    if found["state"] not in STATES or not found["ranks"]:
        raise ValueError("this is no group of ranks")
    return StackGroup(
        tuple(map(int, found["ranks"])),
        hosts,
        bool(found["is_odd"]),
        found["state"],
        str(found["place"]),
        stack,
        float(found["idle"]),
    )


def grouped(ranks: Sequence[CaughtRank], world: int, unheard: Sequence[str] = ()) -> StackGroups:
    """Group ranks that were caught at the same place; the cost is linear in ranks, but for sorting the groups.

    Args:
        ranks: Of all nodes that answered.
        world: Number of ranks in the job.
        unheard: Hosts whose agents gave no answer.
    """
    odd, reason = _judged(ranks, sees_all=not unheard)
    members = dict[Any, list[CaughtRank]]()
    for each in sorted(ranks, key=lambda each: each.witness.rank):
        members.setdefault((each.witness.rank in odd, each.state, each.place, each.frames), []).append(each)
    groups = sorted(
        (_group(key, found) for key, found in members.items()),
        key=lambda group: (not group.is_odd, _ORDER[group.state], len(group.ranks), group.ranks[0]),
    )
    rest = groups[MOST:]
    known = {each.witness.rank for each in ranks}
    missing = ranges([rank for rank in range(world) if rank not in known]) if unheard else ""
    more = len(rest), sum(len(group.ranks) for group in rest)
    return StackGroups(tuple(groups[:MOST]), reason, world, tuple(unheard), missing, more)


def _group(key: tuple[bool, str, str, tuple[str, ...]], members: Sequence[CaughtRank]) -> StackGroup:
    is_odd, state, place, stack = key
    hosts = tuple(dict.fromkeys(each.host for each in members))
    idle = min(each.witness.idle for each in members)
    return StackGroup(tuple(each.witness.rank for each in members), hosts, is_odd, state, place, stack, idle)


def _judged(ranks: Sequence[CaughtRank], *, sees_all: bool) -> tuple[frozenset[int], str]:
    """The ranks that hold the others up, none if that is not certain, and the evidence."""
    # Two ranks wait at one place if they are in one function, and their script has called it in one line.
    # One that spins there, as over NCCL, waits as those do that have just not had the processor.
    places = {id(each): f"{each.place} {each.frames[:1]}" for each in ranks}
    waiting = {places[id(each)] for each in ranks if each.witness.waits}
    known = [
        replace(each.witness, place=place, waits=each.witness.waits or (each.in_collective and place in waiting))
        for each in ranks
        if each.state != "unknown" and (place := places[id(each)])
    ]
    blamed, reason = culprits(known, sees_all=sees_all)
    present = {each.rank for each in known if not (each.has_left or each.goes_on)}
    found = frozenset(each.rank for each in blamed)
    alone = len(present) == 1 and not any(each.waits for each in known if each.rank in present)
    if blamed and (blamed[0].state in _OF_KERNEL or not found >= present or alone):
        return found, reason
    # Ranks that wait over NCCL spin, in whatever function of the script: then it is the most that count as healthy.
    if outliers := _outliers([each for each in known if each.rank in present]):
        return outliers, "is not where most others are"
    # One that has no stack may be anywhere: it is suspected only when everybody else waits.
    silent = frozenset(each.witness.rank for each in ranks if each.state == "unknown")
    if silent and present and all(each.waits for each in known if each.rank in present):
        return silent, _UNKNOWN
    if not sees_all:
        return frozenset(), "what the others wait for may be there"
    return frozenset(), "which of them is to blame is not known"


def blamed_here(
    witnesses: Mapping[int, Witness], numbers: Mapping[int, int], groups: StackGroups | None, *, sees_all: bool
) -> tuple[tuple[int, ...], str]:
    """The ranks of a node to kill first, and why: by all ranks of the job if these are known, else by those here.

    Args:
        witnesses: The ranks of the node, by local rank.
        numbers: Their numbers in the job.
        groups: Of all ranks; None if other nodes could not be asked.
        sees_all: True if all ranks of the job are on the node.
    """
    found, reason = culprits(list(witnesses.values()), sees_all=sees_all)
    blamed = tuple(each.rank for each in found)
    if groups is None:
        return blamed, reason
    odd = {number for group in groups.odd for number in group.ranks}
    if here := tuple(rank for rank, number in numbers.items() if number in odd):
        return here, groups.reason
    if sees_all or not all(each.waits for each in found):
        return blamed, reason
    if groups.odd:
        return blamed, f"waits for {groups.odd[0].name}, which {groups.odd[0].deed}"
    if groups.unheard:
        return blamed, f"waits, perhaps for a rank on {_listed(groups.unheard)}, from where no answer came"
    return blamed, f"waits, as all others do: {groups.reason}"


def _outliers(present: Sequence[Witness]) -> frozenset[int]:
    """Ranks that are not at the place where more than half are; none if there is no such place."""
    [(place, count)] = Counter(each.place for each in present).most_common(1) or [("", 0)]
    return frozenset(each.rank for each in present if 2 * count > len(present) and each.place != place)


def ranges(ranks: Iterable[int]) -> str:
    """Ranks in order as text, such as ``0-36,38-63``; of more than `RANGES` ranges, how many ranks are in the rest."""
    found = [
        [rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), key=lambda each: each[1] - each[0])
    ]
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found[:RANGES]]
    rest = sum(map(len, found[RANGES:]))
    return ",".join(shown) + (f" and {rest} more" if rest else "")


def _listed(hosts: Sequence[str]) -> str:
    """Names of hosts, in words."""
    rest = len(hosts) - SHOWN
    if rest > 0:
        return f"hosts {', '.join(hosts[:SHOWN])} and {rest} more"
    return f"host {hosts[0]}" if len(hosts) == 1 else f"hosts {', '.join(hosts[:-1])} and {hosts[-1]}"
