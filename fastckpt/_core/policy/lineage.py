"""Lines of training: which histories a checkpoint's training came through, and what retention keeps of each line.

A history that another has not resumed from belongs to another run, such as one that was started in the same directory
by mistake: the saves of one run must never be the reason to delete those of another.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from fastckpt._core.policy.retention import Id, Policy, RetentionEntry

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Histories, as the first and the last of each run of neighbours: there are as many as restarts, mostly in one run."""

HISTORIES = "histories"
"""The detail of a checkpoint that has the histories it came through, except its own."""


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


def lines(entries: Iterable[RetentionEntry]) -> list[list[RetentionEntry]]:
    """The checkpoints of the newest history and of all that it came through; then of the others likewise."""
    entries = list(entries)
    pasts: dict[int, Ranges] = {}
    for entry in entries:
        pasts[entry.id[0]] = merged(pasts.get(entry.id[0], ()), entry.past)
    left, found = set(pasts), list[list[RetentionEntry]]()
    while left:
        line = _line(max(left), pasts) & left
        found.append([entry for entry in entries if entry.id[0] in line])
        left -= line
    return found


def kept(policy: Policy, entries: Iterable[RetentionEntry]) -> frozenset[Id]:
    """The checkpoints that a policy keeps of each line, as if there were no other."""
    return frozenset(id for line in lines(entries) for id in policy(line))


def heads(entries: Iterable[RetentionEntry]) -> list[Id]:
    """The newest checkpoint of each line, newest first."""
    return [max(entry.id for entry in line) for line in lines(entries)]


def _line(newest: int, pasts: Mapping[int, Ranges]) -> set[int]:
    # A walk over all pasts, not one look: an earlier version's checkpoint names its parent alone.
    line, waiting = {newest}, [newest]
    while waiting:
        runs = pasts[waiting.pop()]
        before = {each for each in pasts if any(first <= each <= last for first, last in runs)} - line
        line |= before
        waiting += before
    return line


def _is_range(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(each) is int for each in value)
