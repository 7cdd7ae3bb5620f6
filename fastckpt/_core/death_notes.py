"""Notes of objects that have died, left without running Python: a signal's handler could raise in it, unheard."""

import weakref
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Left = TypeVar("Left")
Key = TypeVar("Key", bound=Hashable)
Living = TypeVar("Living")


class DeathNotes(Generic[Left]):
    """Values that objects leave behind when they die, in any thread and at any time, also in a call that holds a lock.

    A finalizer would be Python: an exception that a handler raises there, such as KeyboardInterrupt, is lost, and so
    is the rest of the finalizer's work.
    """

    def __init__(self) -> None:
        # By the identity of the reference, which is in it: watched objects need not be hashable.
        self._living: dict[int, tuple[weakref.ref[object], Left]] = {}
        self._dead: deque[weakref.ref[object]] = deque()

    def watch(self, living: object, left: Left) -> None:
        """Have `taken` give ``left`` once an object has died."""
        ref = weakref.ref(living, self._dead.append)
        self._living[id(ref)] = ref, left

    def taken(self) -> Iterator[Left]:
        """Yield the values of the objects that have died since the last call; each once."""
        while self._dead:
            yield self._living.pop(id(self._dead.popleft()))[1]


class LivingObjects(Generic[Key, Living]):
    """Objects that live, by a key; of one of the same key, the last one. As a WeakValueDictionary, which is Python."""

    def __init__(self) -> None:
        self._refs: dict[Key, weakref.ref[Living]] = {}
        self._dead = DeathNotes[tuple[Key, object]]()

    def get(self, key: Key) -> Living | None:
        """The object, if it lives."""
        ref = self._refs.get(key)
        return ref() if ref else None

    def put(self, key: Key, living: Living, kept: object = None) -> None:
        """Find an object by this key as long as it lives; the ``kept`` one lives at least as long."""
        for dead, _ in self._dead.taken():
            if (ref := self._refs.get(dead)) is not None and ref() is None:
                del self._refs[dead]
        self._refs[key] = weakref.ref(living)
        self._dead.watch(living, (key, kept))
