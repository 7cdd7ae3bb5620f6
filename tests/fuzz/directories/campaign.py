"""Lies about directories drawn by their numbers, and whatever reads or writes these.

python -m tests.fuzz.directories.campaign [FIRST] [END] [KIND...]
"""

import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from tests.fuzz.directories.actions import ACTIONS
from tests.fuzz.directories.lies import Lie, of_entries, of_fields, of_pickles
from tests.fuzz.directories.sandbox import Sandbox
from tests.fuzz.directories.saved import SAVES

FAMILIES = {of_entries: 5, of_fields: 4, of_pickles: 1}
"""Kinds of lies, and how often each is drawn."""


class Campaign:
    """Cases by number: a kind of directory, a lie about it, and an action."""

    def __init__(self, folder: Path, kinds: list[str]) -> None:
        self._folder, self._kinds = folder, kinds
        self._made = dict[str, tuple[Sandbox, list[list[list[Lie]]]]]()

    def case(self, number: int) -> tuple[str, str, Lie, list[str]]:
        """The kind, the action and the lie of a case, and what was wrong."""
        draw, kind = random.Random(number), self._kinds[number % len(self._kinds)]
        if kind not in self._made:
            folder = self._folder / kind
            folder.mkdir()
            sandbox = Sandbox(kind, folder)
            self._made[kind] = sandbox, [_by_entry(family) for family in sandbox.lies(*FAMILIES)]
        sandbox, families = self._made[kind]
        [family] = draw.choices(families, weights=FAMILIES.values())
        lie, action = draw.choice(draw.choice(family)), draw.choice(list(ACTIONS))
        return kind, action, lie, sandbox.wrongs(action, lie)


def _by_entry(lies: list[Lie]) -> list[list[Lie]]:
    """Apart for each entry: long records have most of the lies, and would be drawn only."""
    found = defaultdict[str, list[Lie]](list)
    for lie in lies:
        found[lie.entry].append(lie)
    return list(found.values())


def run(first: int, end: int, kinds: list[str], folder: Path) -> int:
    """Do the cases of these numbers, and print what was wrong; how many were."""
    campaign, began, wrong = Campaign(folder, kinds), time.monotonic(), 0
    for number in range(first, end):
        kind, action, lie, found = campaign.case(number)
        wrong += bool(found)
        for each in found:
            print(f"{number}: {kind}, {action}: {lie.name}: {each}", flush=True)
        if (number + 1) % 100 == 0:
            print(f"{number + 1 - first} cases in {time.monotonic() - began:.0f} s: {wrong} wrong", flush=True)
    print(f"{end - first} cases in {time.monotonic() - began:.0f} s: {wrong} wrong", flush=True)
    return wrong


def main(first: str = "0", end: str = "2000", *kinds: str) -> None:
    with ExitStack() as scratch:
        shm = scratch.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-directories-", dir="/dev/shm"))
        folder = scratch.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-directories-", dir="/dev/shm"))
        os.environ["FASTCKPT_SHM_DIR"] = shm
        sys.exit(run(int(first), int(end), list(kinds) or list(SAVES), Path(folder)) > 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
