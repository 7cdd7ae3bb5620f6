"""Saves that no rank may load any more, though their files are undamaged: the state in them is wrong."""

import logging
from contextlib import closing, suppress

from fastckpt._core.client.collective import Agreement
from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory.held_saves import held_saves
from fastckpt._core.session import Session
from fastckpt._core.storage.store import open_store
from fastckpt.errors import FastckptError

logger = logging.getLogger("fastckpt")

PATIENCE = 60.0
"""Seconds that a persist which is under way, and a rank, have to come to an end."""


def give_up_since(session: Session, ranks: Agreement, step: int, why: str) -> None:
    """Have nobody load saves of this history after a step; all ranks call it.

    Args:
        session: Session that saved.
        ranks: All of them.
        step: The last one that is right.
        why: Reason, written beside those on storage, which are quarantined.
    """
    # 1. each node: saves in memory, before they are persisted   2. no persist is under way any more, on any node
    # 3. the first rank: checkpoints on storage
    link, place = session.link, session.place
    with suppress(FastckptError):
        session.overlap.wait()
    if place.local_rank == 0:
        held = [each.id for each in held_saves(link.arena, link.pin())]
        link.release()
        wrong = [list(save) for save in held if _is_after(save, link.history, step)]
        link.report_bad(wrong, storage=False, distrusted=True)
        with suppress(TimeoutError, FastckptError):
            session.wait(PATIENCE)
    ranks.gather(None, 2 * PATIENCE)
    if place.rank == 0:
        for location in filter(None, (session.directory, link.options.remote)):
            _quarantine(location, link.history, step, why)
    ranks.gather(None, 2 * PATIENCE)
    if place.local_rank == 0:
        link.report_bad([], storage=True)


def _quarantine(location: str, history: int, step: int, why: str) -> None:
    with closing(open_store(location)) as store:
        try:
            for stored in store.checkpoints():
                if _is_after(stored.id, history, step):
                    logger.warning("%s is quarantined as %s: %s", stored.id, store.quarantine(stored, why), why)
        except FastckptError as error:
            logger.error("wrong checkpoints in %s could not be quarantined: %s", location, error)


def _is_after(save: SaveId, history: int, step: int) -> bool:
    return save.history == history and save.step > step
