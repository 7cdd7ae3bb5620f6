"""Save that a spare has prefetched, in memory beside the arena that is made once it has a rank."""

import secrets
from pathlib import Path

from fastckpt._core.config import Settings
from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import Arena, arena_path
from fastckpt._core.memory.held_saves import keep_digests, kept_place
from fastckpt._core.memory.records import make_folders, remove_any
from fastckpt._core.memory.replica_files import ReplicaFiles
from fastckpt._core.saver.arena_location import place
from fastckpt._core.saver.peers.file_transfer import SaveName


class StagedSave:
    """The prefetched files of one checkpoint directory; raises as `Arena.open`.

    Attributes:
        arena: Arena of the files; `sweep` removes it once its owner is dead.
        files: Files of the whole save, and of one that comes.
        whole: The save of which all files are there, and the address of their node; None for none.
    """

    def __init__(self, settings: Settings, directory: str) -> None:
        path = arena_path(str(place(settings)), directory, 0)
        path = path.with_name(f"{path.name}.prefetch-{secrets.token_hex(4)}")
        # Another name than the directory's: a search for the job's agents by that name does not find a spare.
        self.arena = Arena.open(path, f"prefetched of {directory}")
        self.files = ReplicaFiles(self.arena.path, set, set, lambda: False)
        self.whole: tuple[SaveName, str] | None = None

    @property
    def bytes(self) -> int:
        """Bytes that it takes, with those of files that were released and serve again."""
        return self.files.bytes()

    def place(self, save: SaveName) -> Path:
        """Return the directory with the files of a save."""
        return kept_place(self.arena.path, save.id, save.attempt)

    def make_way(self, save: SaveName) -> None:
        """Release all but a save that comes, and the one that is whole."""
        self.files.make_way(save.id, self.whole[0].id if self.whole else save.id)

    def finish(self, save: SaveName, address: str) -> None:
        """Note that a save is whole, and release the one before."""
        before, self.whole = self.whole, (save, address)
        self.make_way(save)
        if before is not None and before[0] != save:
            remove_any(self.place(before[0]))

    def move(self, arena: Path) -> None:
        """Add the whole save to an arena's copies of other nodes' files; raises OSError."""
        if self.whole is None:
            return
        save, _ = self.whole
        place, target = self.place(save), kept_place(arena, save.id, save.attempt)
        make_folders(arena, target)
        for name in slots.images_in(place).keys() - slots.images_in(target).keys():
            make_folders(target, (target / name).parent)
            (place / name).rename(target / name)
        keep_digests(target, save.id, slots.read_digests(place, save.id))
        for rank, part in slots.read_parts(place).items():
            slots.commit(target, rank, part)
