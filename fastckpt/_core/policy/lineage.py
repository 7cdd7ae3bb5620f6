"""Lines of training: the histories that a checkpoint's training came through, and the checkpoints kept of each line.

A history that another has not resumed from belongs to another run, such as one that was started in the same directory
by mistake: the saves of one run must never be the reason to delete those of another. So it is with checkpoints that a
job passed over as it resumed an older one: they are not proved damaged, and may be all that is left of the training
after it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from fastckpt._core.policy.retention import Id, Policy, RetentionEntry

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Histories, as the first and the last of each run of neighbours: there are as many as restarts, mostly in one run."""

HISTORIES = "histories"
"""The detail of a checkpoint that has the histories it came through, except its own."""


PASSED_OVER = "passed_over"
"""The detail of a checkpoint with the saves that its history, or one before, passed over: as history and step."""
MOST = 64
"""Number of histories that a checkpoint names at most, the newest ones."""


def merged(*parts: Iterable[tuple[int, int]]) -> Ranges:
    """The histories of all parts."""
    runs: list[tuple[int, int]] = []
    for first, last in sorted(each for part in parts for each in part):
        # Runs that touch are joined, so a job with a thousand restarts keeps one pair, not a thousand numbers.
        if runs and first <= runs[-1][1] + 1:
            runs[-1] = runs[-1][0], max(runs[-1][1], last)
        else:
            runs.append((first, last))
    return tuple(runs)


def past(details: Mapping[str, Any], parent: Id | None) -> Ranges:
    """The histories that a checkpoint came through; one of an earlier version names its parent alone."""
    if isinstance(said := details.get(HISTORIES), list):
        return merged((first, last) for first, last in filter(_is_range, said))
    return ((parent[0], parent[0]),) if parent else ()


def passed_over(details: Mapping[str, Any]) -> frozenset[Id]:
    """The checkpoints that the histories of one have passed over."""
    said = details.get(PASSED_OVER)
    return frozenset((first, last) for first, last in filter(_is_range, said if isinstance(said, list) else []))


def lines(entries: Iterable[RetentionEntry]) -> list[list[RetentionEntry]]:
    """The checkpoints of the newest history and of all that it came through; then of the others likewise."""
    entries = list(entries)
    pasts: dict[int, Ranges] = {}
    for entry in entries:
        pasts[entry.id[0]] = merged(pasts.get(entry.id[0], ()), entry.past)
    left, lines_of = _Left(pasts), dict[int, list[RetentionEntry]]()
    found = list[list[RetentionEntry]]()
    for newest in reversed(left.histories):
        if newest not in lines_of:
            found.append([])
            # Histories of an earlier line are not walked through again: all that it came through is in that line, too.
            lines_of |= dict.fromkeys(_line(newest, pasts, left), found[-1])
    for entry in entries:
        lines_of[entry.id[0]].append(entry)
    return found


def kept(policy: Policy, entries: Iterable[RetentionEntry]) -> frozenset[Id]:
    """The checkpoints that a policy keeps of each line, as if there were no other; and all that were passed over."""
    entries = list(entries)
    passed = spared(entries)
    return passed.union(*map(policy, lines(entry for entry in entries if entry.id not in passed)))


def spared(entries: Iterable[RetentionEntry]) -> frozenset[Id]:
    """The checkpoints that were passed over for the sake of older ones."""
    entries = list(entries)
    return frozenset(entry.id for entry in entries).intersection(id for each in entries for id in each.passed_over)


def heads(entries: Iterable[RetentionEntry]) -> list[Id]:
    """The newest checkpoint of each line, newest first."""
    return [max(entry.id for entry in line) for line in lines(entries)]


class _Left:
    """Histories that no line has yet. Each is taken once, however many runs it is in: a job may have thousands."""

    def __init__(self, histories: Iterable[int]) -> None:
        self.histories = sorted(histories)
        self._next = [*range(len(self.histories) + 1)]

    def take(self, first: int, last: int) -> Iterator[int]:
        """Yield, and take out, the histories from a first one to a last one."""
        end = bisect_right(self.histories, last)
        at = self._from(bisect_left(self.histories, first))
        while at < end:
            self._next[at] = at + 1
            yield self.histories[at]
            at = self._from(at)

    def _from(self, at: int) -> int:
        """The first place from here on whose history is left; paths to it are halved on the way."""
        while self._next[at] != at:
            self._next[at] = at = self._next[self._next[at]]
        return at


def _line(newest: int, pasts: Mapping[int, Ranges], left: _Left) -> list[int]:
    # A walk over all pasts, not one look: an earlier version's checkpoint names its parent alone.
    waiting = [*left.take(newest, newest)]
    line = [*waiting]
    while waiting:
        waiting = [before for each in waiting for run in pasts[each] for before in left.take(*run)]
        line.extend(waiting)
    return line


def _is_range(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(each) is int for each in value)
