"""Deeds on a checkpoint directory, recorded, and all that a disk may hold if power is lost in the middle of them."""

import contextlib
import copy
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.local.layout import TRACKER
from tests.unit._core.storage.checkpoints import assert_clean, assert_named, assert_sound
from tests.unit._core.storage.disk import Disk, Tree, restore
from tests.unit._core.storage.recorder import Killed, Operation, Recorder

Act = Callable[[CheckpointDirectory], object]


@dataclass
class Deed:
    """What was done below a root, in whose ``dir`` the checkpoints are.

    Attributes:
        start: The files that were there before.
        before, after: What a reader found, newest first.
        begun: How many operations had been made before by others, who are dead.
        puts: Whether it makes the file at the path that a user named; a sweep does not.
    """

    root: Path
    start: Disk
    operations: list[Operation]
    before: list[SaveId]
    after: list[SaveId]
    begun: int = 0
    puts: bool = True

    @property
    def directory(self) -> CheckpointDirectory:
        """A fresh reader."""
        return CheckpointDirectory(self.root / "dir")

    def crashes(self, limit: int, first: int = 0) -> Iterator[tuple[Tree, bool]]:
        """What a disk may hold after each operation from the first on, each once, and whether the deed was over.

        ``limit`` bounds how many are tried after one operation.
        """
        disk, seen = copy.deepcopy(self.start), set()
        for number in range(len(self.operations) + 1):
            over = number == len(self.operations)
            for tree in disk.crashes(limit, random.Random(number)) if number >= max(first, self.begun) else ():
                if (tree, over) not in seen:
                    seen.add((tree, over))
                    yield tree, over
            if not over:
                disk.apply(self.operations[number])

    def check(self, tree: Tree, *, over: bool) -> None:
        """A fresh reader finds the old or the new, whole; so it does after a sweep, which leaves nothing behind."""
        restore(tree, self.root)
        found = assert_sound(self.directory)
        if over and self.puts:
            assert_named(self.directory)
        # A checkpoint retired for a newer one of its step need not remain.
        lasting = {id for id in {*self.before} & {*self.after} if id.step != self.after[0].step}
        assert found[:1] in ([self.after[:1]] if over else [self.before[:1], self.after[:1]])
        assert lasting <= set(found) <= lasting | set(self.after if over else self.before + self.after)
        self._check_tracker(over)
        gathered = self.directory.scan().gathered  # if all of its parts are there, the sweep publishes it
        self.directory.sweep()
        left = assert_sound(self.directory)
        assert left[0] in [found[0], *gathered] if found else set(left) <= set(gathered)
        assert lasting <= set(left) <= {*found, *gathered}
        assert self.directory.sweep() == []
        assert_named(self.directory, is_over=over and self.puts)
        self._check_files()

    def _check_tracker(self, over: bool) -> None:
        tracker = self.root / "dir" / TRACKER
        returned = over and not self.begun
        steps = {str(id.step) for id in (self.after[:1] if returned else self.before + self.after)}
        if tracker.is_file():
            assert tracker.read_text() in steps
        elif returned and not tracker.is_dir():
            assert not self.after, "there is no tracker"

    def _check_files(self) -> None:
        """Nothing is left but checkpoints, and what others made."""
        assert_clean(self.directory)
        owned = {path for stored in self.directory.scan().places for path in (stored.target, stored.place)}
        found = {path for path in self.root.rglob("*.pt") if "checkpoint-" not in str(path)}
        assert {path for path in found if path.parent not in owned} <= owned
        assert any(self.root.rglob("theirs")) == any(path.endswith("/theirs") for path, _, _ in self.start.tree)


def record(
    root: Path, act: Act, *, after: Deed | None = None, kill_after: int | None = None, sound: bool = True
) -> Deed:
    """Do something.

    Args:
        root: Below it all is recorded; the checkpoints are in its ``dir``.
        act: What to do.
        after: What another did before, who died in the middle of it.
        kill_after: How many operations are made before this one dies, too.
        sound: Whether nothing is damaged there; else no ids are recorded.
    """
    root.mkdir(parents=True, exist_ok=True)
    directory = CheckpointDirectory(root / "dir")
    find = assert_sound if sound else lambda directory: []
    before, disk, recorder = after.before if after else find(directory), Disk(root), Recorder(root, kill_after)
    with contextlib.suppress(Killed) if kill_after is not None else contextlib.nullcontext(), recorder.recording():
        act(directory)
    earlier = after.operations if after else []
    opened = max((op.handle for op in earlier), default=0)
    operations = earlier + [replace(op, handle=op.handle + opened) for op in recorder.operations]
    start, puts = after.start if after else disk, act is not CheckpointDirectory.sweep
    deed = Deed(root, start, operations, before, find(directory), len(earlier), puts)
    assert_nothing_escaped(deed)
    return deed


def assert_nothing_escaped(deed: Deed) -> None:
    """Replaying all operations makes the very files that are there."""
    disk = copy.deepcopy(deed.start)
    for op in deed.operations:
        disk.apply(op)
    assert disk.tree == Disk(deed.root).tree


def purposes(deed: Deed) -> list[str]:
    """What each operation is for, if it is a sync: a file, by its later name; or a directory, and its last change."""
    found, latest = [], {}
    for number, op in enumerate(deed.operations):
        path, to = Path(op.path), Path(op.to)
        if op.kind == "rename":
            latest[path.parent] = latest[to.parent] = f"{_plain(path.name)} -> {_plain(to.name)}"
        elif op.kind == "link":
            latest[to.parent] = f"+ {_plain(to.name)}"
        elif op.made or op.kind in ("unlink", "rmdir"):
            latest[path.parent] = f"{'+' if op.made else '-'} {_plain(path.name)}"
        later = [Path(o.to) for o in deed.operations[number:] if o.kind == "rename" and o.path == op.path]
        name = "/".join((*later, path)[0].parts[-2:])
        found.append(_plain(f"{path.name}: {latest[path]}" if path in latest else name) if op.kind == "sync" else "")
    return found


def _plain(name: str) -> str:
    """A name without what differs from time to time."""
    named = re.sub("best|global_step7", "checkpoint-7", name)
    return re.sub("[0-9]+", "N", re.sub("-[0-9a-f]{12}", "-*", named))
