"""A disk that loses power: what may be left of a sequence of file operations, by what POSIX promises.

A name that its directory's fsync has not made durable may be there or not, each independently of the others;
a rename may have happened, or not, or have left both names. (It is one change: both names are lost only if the old
one's directory was synced and the new one's was not.) Bytes that were not synced may be there, be missing, in part,
from the end on, or read as zeros. What a journal that keeps the order of operations could leave is among it.
"""

import itertools
import math
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.unit._core.storage.recorder import Operation

Tree = tuple[tuple[str, int, bytes | None], ...]
"""Path below the root, number of the file, and its bytes, None for a directory; directories before what they hold."""
Part = tuple[int, str, int | None]
"""In a directory, a name stands for a file; for none any more if that is None."""


@dataclass
class File:
    """What a file holds: what outlives a crash, and what processes read."""

    durable: bytes = b""
    content: bytes = b""

    @property
    def leftovers(self) -> list[bytes]:
        """What may be left of it after a crash."""
        old, new = self.durable, self.content
        if old == new:
            return [new]
        half, kept = len(new) // 2, itertools.zip_longest(new, old[: len(new)])
        zeros = bytes(a if a == b else 0 for a, b in kept)
        return list(dict.fromkeys([old, new, zeros, new[:half], new[:half] + bytes(len(new) - half)]))


class Disk:
    """All files below a root, and what of them is durable; at first, all that is there."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[int, File] = {}
        self._durable: dict[int, dict[str, int]] = {}
        self._now: dict[int, dict[str, int]] = {}
        self._waiting: list[list[Part]] = []
        self._handles: dict[int, int] = {}
        self._top = self._adopt(root)

    def _adopt(self, path: Path) -> int:
        number = path.stat().st_ino
        if path.is_dir():
            self._durable[number] = {child.name: self._adopt(child) for child in sorted(path.iterdir())}
            self._now[number] = dict(self._durable[number])
        else:
            self._files[number] = File(path.read_bytes(), path.read_bytes())
        return number

    def apply(self, op: Operation) -> None:
        """Do what a process did."""
        match op.kind:
            case "open" if op.made:
                self._files[op.made] = File()
                self._change((*self._name(op.path), op.made))
                self._handles[op.handle] = op.made
            case "open":
                self._handles[op.handle] = self._find(op.path)
            case "mkdir":
                self._durable[op.made], self._now[op.made] = {}, {}
                self._change((*self._name(op.path), op.made))
            case "write" | "truncate":
                self._write(self._files[self._handles[op.handle]], op)
            case "sync":
                self._sync(self._handles[op.handle])
            case "rename":
                self._change((*self._name(op.to), self._find(op.path)), (*self._name(op.path), None))
            case "link":
                self._change((*self._name(op.to), self._find(op.path)))
            case "unlink" | "rmdir":
                self._change((*self._name(op.path), None))
            case _:
                raise AssertionError(op)

    def _write(self, file: File, op: Operation) -> None:
        before, after = file.content[: op.offset].ljust(op.offset, b"\0"), file.content[op.offset + len(op.data) :]
        file.content = before + op.data + (after if op.kind == "write" else b"")

    def _change(self, *parts: Part) -> None:
        self._waiting.append(list(parts))
        _enter(self._now, parts)

    def _sync(self, number: int) -> None:
        if number in self._files:
            self._files[number].durable = self._files[number].content
            return
        for parts in self._waiting:
            _enter(self._durable, [part for part in parts if part[0] == number])
            parts[:] = [part for part in parts if part[0] != number]
        self._waiting = [parts for parts in self._waiting if parts]

    def _find(self, path: str) -> int:
        number = self._top
        for name in Path(path).relative_to(self._root).parts:
            number = self._now[number][name]
        return number

    def _name(self, path: str) -> tuple[int, str]:
        return self._find(os.path.dirname(path)), os.path.basename(path)

    @property
    def tree(self) -> Tree:
        """What processes see."""
        return self._tree(self._now, {number: file.content for number, file in self._files.items()})

    def crashes(self, limit: int, chance: random.Random) -> Iterator[Tree]:
        """What may be left if power is lost now: everything, if that is at most ``limit``, else a choice from it."""
        waiting = [[[], parts, *([parts[:1]] if len(parts) > 1 else [])] for parts in self._waiting]
        dirty = [number for number, file in self._files.items() if file.durable != file.content]
        options = waiting + [self._files[number].leftovers for number in dirty]
        for choice in _choices([len(option) for option in options], len(waiting), limit, chance):
            chosen = [option[index] for option, index in zip(options, choice, strict=True)]
            names = {number: dict(entries) for number, entries in self._durable.items()}
            for parts in chosen[: len(waiting)]:
                _enter(names, parts)
            contents = {number: file.durable for number, file in self._files.items()}
            yield self._tree(names, contents | dict(zip(dirty, chosen[len(waiting) :], strict=True)))

    def _tree(self, names: dict[int, dict[str, int]], contents: dict[int, bytes]) -> Tree:
        def walk(directory: int, path: str) -> Iterator[tuple[str, int, bytes | None]]:
            for name, number in sorted(names[directory].items()):
                yield path + name, number, contents.get(number)
                if number in names:
                    yield from walk(number, f"{path}{name}/")

        return tuple(walk(self._top, ""))


def _enter(names: dict[int, dict[str, int]], parts: list[Part] | tuple[Part, ...]) -> None:
    for directory, name, number in parts:
        if directory in names:
            names[directory].pop(name, None)
            if number is not None:
                names[directory][name] = number


def _choices(sizes: list[int], ordered: int, limit: int, chance: random.Random) -> Iterator[tuple[int, ...]]:
    """An index below each size: all there are, or those of a journal that keeps order, and others by chance."""
    if math.prod(sizes) <= limit:
        yield from itertools.product(*map(range, sizes))
        return
    for done in range(ordered + 1):
        for rest in (0, 1):
            yield (1,) * done + (0,) * (ordered - done) + tuple(min(rest, size - 1) for size in sizes[ordered:])
    for _ in range(limit):
        yield tuple(chance.randrange(size) for size in sizes)


def restore(tree: Tree, root: Path) -> None:
    """Make these files, and no others, the ones below the root."""
    for child in root.iterdir():
        shutil.rmtree(child) if child.is_dir() else child.unlink()
    places: dict[int, Path] = {}
    for path, number, content in tree:
        if content is None:
            (root / path).mkdir()
        elif number in places:
            (root / path).hardlink_to(places[number])
        else:
            places[number] = root / path
            places[number].write_bytes(content)
