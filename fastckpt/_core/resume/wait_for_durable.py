"""Has the newest save that all nodes hold in memory made durable before a resume, if no node holds enough of it."""

import logging
import time
from contextlib import suppress

from fastckpt._core.client.collective import Agreement
from fastckpt._core.client.connection import SaverClient
from fastckpt._core.client.save_results import TO_DISK
from fastckpt._core.format.ids import SaveId
from fastckpt._core.resume.candidates import CandidateFinder
from fastckpt.errors import FastckptError

logger = logging.getLogger("fastckpt")

DEADLINE = 600.0
"""Seconds that storage may take."""
GIVEN_UP = "given up"
LONGEST_PAUSE = 0.5
"""Seconds between two looks."""


def join_on_storage(offers: CandidateFinder, link: SaverClient, agreement: Agreement) -> None:
    """Return when storage has the newest save of which each node has its part, unless memory is enough for all ranks.

    A node flushes the newest that it has by itself, which may be newer than what the others have, or not done yet.
    Nothing is waited for while storage is in trouble.
    """
    held = [[*save.id, save.attempt, is_enough] for save, is_enough in offers.held().items()]
    reports = agreement.gather([held, link.durable])
    common = set.intersection(*({tuple(save[:3]) for save in report} for report, _ in reports))
    newest, durable = max(common, default=None), max(tuple(each) for _, each in reports)
    if newest is None or newest[:2] <= durable or all([*newest, True] in report for report, _ in reports):
        return
    save = SaveId(*newest[:2])
    if link.place.local_rank == 0:
        logger.info("%s is in the memory of all nodes, and joined on storage", save)
        with suppress(FastckptError):
            link.committed(save, TO_DISK)
    end, pause = time.monotonic() + DEADLINE, 0.02
    while any(states := agreement.gather(_missing(save, link, end))) and GIVEN_UP not in states:
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE)


def _missing(save: SaveId, link: SaverClient, end: float) -> str:
    """Empty once the save is durable, as far as this node knows."""
    try:
        status = link.status()
    except FastckptError:
        return GIVEN_UP
    if tuple(status.newest) >= save:
        return ""
    return GIVEN_UP if status.trouble or time.monotonic() > end else "not yet"
