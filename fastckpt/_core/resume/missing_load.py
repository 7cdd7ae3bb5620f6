"""A warning for trainings that save beside checkpoints which they have not loaded."""

import logging

from fastckpt._core.client.connection import SaverClient
from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import slots_of
from fastckpt.errors import FastckptError

logger = logging.getLogger("fastckpt")


def warn_of_unloaded(link: SaverClient, save: SaveId) -> None:
    """Name the newest checkpoint that the job has not loaded before its first save, if there is one."""
    try:
        newest = _newest_before(link, save.history)
    except (FastckptError, OSError) as error:
        logger.debug("what was saved before %s could not be looked up: %s", save, error)
        return
    if newest is not None:
        logger.warning(
            "step %d is saved to %s without loading step %d, which is there: a new history begins that does not go on "
            "from it. Call load_checkpoint() (of Checkpointer: resume()) before the first save, or give another "
            "directory. Retention keeps what was saved before; a checkpoint of the same step takes its place; to "
            "delete it: fastckpt prune %s --drop-history %d",
            save.step, link.wishes.directory, newest.step, link.wishes.directory, newest.history,
        )  # fmt: skip


def _newest_before(link: SaverClient, history: int) -> SaveId | None:
    """The newest checkpoint of an older history, in memory or durable. Nothing is pinned: other ranks may save now."""
    durable = link.status().newest
    found = [SaveId(*durable)] if durable else []
    found += [id for slot in slots_of(link.arena) if (id := slots.read(slot).committed)]
    return max((id for id in found if id.history < history), default=None)
