"""Large files of other nodes' ranks that this node keeps: received whole or not at all, in pages that serve again.

They are beside the small ones of the same save, in the directory that `held_saves` reads, or in the same place of a
folder on a disk. Files that are released are kept by their size until a new one of that size comes: pages that are
there already are written ten times as fast.
"""

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from fastckpt._core.byte_sizes import binary
from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.memory.copies_folder import CopiesFolder
from fastckpt._core.memory.headroom import headroom
from fastckpt._core.memory.held_saves import KEPT, keep_digests, kept_place, kept_places
from fastckpt._core.memory.pages import allocate
from fastckpt._core.memory.parity_records import parity_places
from fastckpt._core.memory.records import make_folders, names_in, remove_any
from fastckpt._core.policy.replicas.copy_sizes import SMALL
from fastckpt.errors import ArenaTooSmall

KEPT_SAVES = 4
"""Saves of which small files of other nodes are kept: as many as there are slots, and one that is on its way."""
_NEW = ".new-"
_SPARE = "spare"
"""The directory of an arena with files that were released."""


class ReplicaFiles:
    """Copies of other nodes' saves in an arena; any thread may use it.

    Args:
        arena: The arena.
        of: The ids of the saves in its slots.
        needed: The ids of the newest save that all nodes hold, and of one that is to be it next.
        in_use: Returns whether a process of this node may be reading the copies, or choose to.
        refusal: Reason why nothing is kept; empty if copies are kept.
        folder: Folder of large files; the arena, if none is given.

    Attributes:
        lock: Held while records are written beside the files.
    """

    def __init__(
        self,
        arena: Path,
        of: Callable[[], Collection[SaveId]],
        needed: Callable[[], Collection[SaveId]],
        in_use: Callable[[], bool],
        refusal: Callable[[], str] = str,
        folder: CopiesFolder | None = None,
    ) -> None:
        self._arena, self._of, self._needed, self._in_use = arena, of, needed, in_use
        self._refusal, self._folder = refusal, folder or CopiesFolder(arena)
        self.lock = threading.RLock()
        self._making = threading.Lock()

    def clear_away(self) -> None:
        """Remove unfinished and spare files of an owner that died."""
        for root in self._folder.roots:
            for left in [*(root / KEPT).rglob(f"{_NEW}*"), *(root / _SPARE).glob("*")]:
                with contextlib.suppress(OSError):
                    remove_any(left)

    def has(self, id: SaveId, attempt: str, name: str, size: int, digest: str) -> bool:
        """Return whether a file has arrived with this digest and size."""
        if slots.read_digests(kept_place(self._arena, id, attempt), id).get(name) != digest:
            return False
        return not slots.damage(kept_place(self._folder.path, id, attempt), {name: size})

    @contextlib.contextmanager
    def receive(self, id: SaveId, attempt: str, name: str, size: int) -> Iterator[tuple[int, Callable[[str], None]]]:
        """A place for a file that comes: its descriptor, and a function to call with its xxh3-128 once it is whole.

        Raises:
            ArenaTooSmall: There is no memory for it, or no room on the disk.
            OSError: The arena was removed.
        """
        if why := self._refusal():
            raise ArenaTooSmall(why)
        self._folder.ensure()
        place, root = kept_place(self._arena, id, attempt), self._folder.path
        path, whole = kept_place(root, id, attempt) / name, list[str]()
        # A name of its own: a transfer from a sender that is cut off may take long to end.
        temporary = path.with_name(f"{_NEW}{secrets.token_hex(4)}-{path.name}")
        try:
            make_folders(self._arena, place)
            fd = self._file_in(root, temporary, size)
            try:
                yield fd, whole.append
            finally:
                os.close(fd)
            if whole:
                with self.lock:
                    keep_digests(place, id, {name: whole[0]})
                    temporary.rename(path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def make_way(self, save: SaveId, common: SaveId | None) -> bool:
        """Release large files of all saves but the one that comes, and the newest that all nodes hold.

        Returns whether that could be done: not while processes may read them.

        Args:
            save: The save of which a file comes.
            common: The newest save that all nodes hold; None if the sender knows of none in this round.
        """
        return self._release({save, common} if common else {save, *self._needed()})

    def release_old(self) -> bool:
        """Release large files of saves that are older than the newest that all nodes hold; as `make_way`."""
        oldest = min(self._needed(), default=SaveId(0, 0))
        return self._release({id for root in self._folder.roots for id in kept_places(root).values() if id >= oldest})

    def give_back(self, needed: Collection[SaveId], *, small: bool) -> None:
        """Remove large files of other saves than these, where no newer copies come in their place; or ``small``, too.

        Others rely on the small ones as long as they are there.
        """
        with self.lock:
            roots = self._folder.roots
            old = [place for root in roots for place, id in kept_places(root).items() if id not in needed]
            large = [p / name for p in old for name, size in slots.images_in(p).items() if size > SMALL]
            spare = [path for root in roots for path in (root / _SPARE).glob("*")]
            for path in [*(old if small else large), *spare]:
                with contextlib.suppress(OSError):  # the arena is being removed
                    remove_any(path)

    def _release(self, needed: Collection[SaveId]) -> bool:
        with self.lock:
            if self._in_use():
                return False
            places = kept_places(self._arena)
            newest = {*sorted(places.values(), reverse=True)[:KEPT_SAVES], *needed, *self._of()}
            for root in self._folder.roots:
                for place, id in kept_places(root).items():
                    if id not in needed:
                        self._make_spare(place, root)
                    if id not in (needed if root in self._folder.former else newest):
                        remove_any(place)
            self._folder.forget_former(lambda root: bool(kept_places(root) or parity_places(root)))
            return True

    def bytes(self) -> int:
        """Bytes of large files, also of coming and spare ones."""
        found = 0
        root = self._folder.path
        for path in [*(root / KEPT).rglob("*"), *(root / _SPARE).glob("*")]:
            with contextlib.suppress(OSError):
                size = path.lstat().st_size
                found += size if size > SMALL else 0
        return found

    def _make_spare(self, place: Path, root: Path) -> None:
        is_useless = root != self._folder.path or bool(self._refusal())  # nothing comes here any more
        for name, size in slots.images_in(place).items():
            if size > SMALL and is_useless:
                remove_any(place / name)
            elif size > SMALL:
                make_folders(root, root / _SPARE)
                (place / name).rename(root / _SPARE / f"{size}-{secrets.token_hex(4)}")

    def _file_in(self, root: Path, temporary: Path, size: int) -> int:
        try:
            make_folders(root, temporary.parent)
            return self._file_of(temporary, size)
        except FileNotFoundError:
            raise  # the arena, or the folder, was removed just now
        except OSError as error:
            raise ArenaTooSmall(f"a copy of {binary(size)} cannot be made: {error}") from error

    def _file_of(self, temporary: Path, size: int) -> int:
        """A file of this size, with all its memory or disk: a spare one, else a new one, for which spare ones go."""
        remove_any(temporary)
        root = self._folder.path
        with self.lock:
            spare = [root / _SPARE / name for name in names_in(root / _SPARE)]
            if found := next((path for path in spare if path.name.startswith(f"{size}-")), None):
                found.rename(temporary)
                return os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            for path in spare:
                remove_any(path)
        with self._making:  # one at a time: two would count the same free memory
            room = headroom(root.parent)
            if room.free < size:
                remedies = self._folder.remedies(room, size - room.free)
                raise ArenaTooSmall(f"a copy of {binary(size)} does not fit: {room}. {remedies}")
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                allocate(fd, size)
            except OSError as error:
                os.close(fd)
                raise ArenaTooSmall(f"a copy of {binary(size)} does not fit: {error}; {room}") from error
            return fd
