"""Removes files that ModelCheckpoint does not keep, and flushed checkpoints that nothing needs any more."""

import logging
from collections.abc import Callable
from contextlib import closing

from fastckpt._core.retention import passed_over_in
from fastckpt._core.storage.store import Store, StoredCheckpoint, normalised, open_store
from fastckpt.errors import FastckptError
from fastckpt.lightning.saves import IN_MEMORY, KEPT_FOR

logger = logging.getLogger("fastckpt")


class Removal:
    """Paths to be removed, on the first rank: the newest durable checkpoint never is, so some removals must wait.

    ModelCheckpoint has paths from the loaded checkpoint, too, which may name anything: only files in the checkpoint
    directory, or saved elsewhere by this process, are removed.
    """

    def __init__(self) -> None:
        self._unwanted: set[str] = set()
        self._own: set[str] = set()

    def remove(self, path: str) -> None:
        """Have a file removed by `carry_out`, as soon as it can be."""
        self._unwanted.add(normalised(path))

    def keep(self, path: str) -> None:
        """A file of this name is saved, so it is wanted again."""
        self._own.add(normalised(path))
        self._unwanted.discard(normalised(path))

    def carry_out(self, directory: str, unlink: Callable[[str], None], *, is_busy: bool) -> None:
        """Remove paths that can be removed by now; ``unlink`` removes files that something else wrote.

        Args:
            directory: The checkpoint directory.
            is_busy: Whether anything may still be on its way there.
        """
        try:
            with closing(open_store(directory)) as store:
                scan = store.scan()
                passed = passed_over_in(scan.places)
                # Not the first, which is the newest: until there is a newer one it may be all that a resume has.
                for kept in scan.whole[1:]:
                    if self._is_unwanted(kept) and kept.id not in passed:
                        self._delete(store, kept, unlink)
                ours = {str(kept.path) for kept in scan.places}
            for path in sorted(self._unwanted - ours) if not is_busy else ():
                if path in self._own or path.startswith(f"{normalised(directory)}/"):
                    unlink(path)
                else:
                    logger.warning("%s is not removed: it is outside of %s, and not of this process", path, directory)
                self._unwanted.discard(path)
        # Retried at the next removal: paths that are not removed yet stay in the set.
        except (FastckptError, OSError) as error:
            logger.warning("checkpoints that are not kept could not be removed: %s", error)

    def _is_unwanted(self, kept: StoredCheckpoint) -> bool:
        is_flush = kept.manifest.details.get(KEPT_FOR) == IN_MEMORY
        return is_flush or str(kept.path) in self._unwanted

    def _delete(self, store: Store, kept: StoredCheckpoint, unlink: Callable[[str], None]) -> None:
        path = str(kept.path)
        store.delete(kept.id)
        if path in self._own & self._unwanted and not path.startswith(f"{store.path}/"):
            unlink(path)  # the store leaves files outside of it to its user
        self._unwanted.discard(path)
