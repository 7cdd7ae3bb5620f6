"""The job's own keys in the store that formed the process group, without messages of an earlier round."""

import itertools
import logging
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fastckpt._core.client.mailbox import StoreMailbox
from fastckpt._core.config import RankInfo, copy_of_environment
from fastckpt._core.error_codes import coded
from fastckpt._core.torch_private.tensors import default_store, group_stores
from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt")

TIMEOUT = timedelta(hours=1)
"""The time that the slowest rank may take to verify its files, which may mean to download them, and to load them.

A rank that dies or gives up is not waited for so long: its launcher ends the others.
"""
PATIENCE = 60.0
"""Seconds until the log names missing ranks: perhaps they never construct a checkpointer."""

MOST_NAMED = 8
"""Ranks that a message names."""

FORMING_PATIENCE = 30.0
"""Seconds in which a process group forms, if no address in the store is stale."""
FORMING = {"init_process_group", "new_group"}
EXPLANATION = (
    "torchrun keeps its store while it restarts workers: this one (restart %d) may have read there where a dead worker "
    "listened. fastckpt removes these addresses once all ranks have loaded; a group that failed, or was formed, "
    "at another time leaves them. Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment and "
    "--standalone or --rdzv-backend=c10d (a static rendezvous, as with --master-addr, ignores it), or start the "
    "script with fastckpt-run."
)

_NAME, _LAST = "name", "last"
"""Keys of the name that is announced, and of the last that was confirmed."""

_sessions: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_turn = threading.Lock()


def session() -> str:
    """The name of this process group, which no other one has ever had; all ranks call it together the first time.

    torchrun keeps its store while workers are restarted, and a process may form one group after another in the same
    store. Restart counts do not distinguish these, because agents of several nodes count independently; nor do keys of
    an earlier first rank. So the first rank draws a name and announces it. Each other rank answers the announcement
    with a random word, and the first rank confirms the name by the words of all that came. A name that was announced
    by a dead rank is confirmed with the words of the dead, or of none, once the next first rank has come.

    Raises torch's DistStoreError if a rank does not come within `TIMEOUT`.
    """
    with _turn:  # checkpointers of several threads must not ask twice: the first rank answers each rank once
        group = dist.group.WORLD
        if group not in _sessions:
            mailbox, rank = StoreMailbox(_part("meet")), dist.get_rank()
            _sessions[group] = _announce(mailbox, dist.get_world_size()) if rank == 0 else _come(mailbox, rank)
        return _sessions[group]


@dataclass(frozen=True)
class JobRanks:
    """The ranks of a process group, of which this is one, and the store in which they find each other's messages.

    Attributes:
        name: Of the process group, see `session`.
        store: Store in which it was formed.
        rank: This one.
        world: Number of ranks.
    """

    name: str
    store: "dist.distributed_c10d.Store"
    rank: int
    world: int

    @classmethod
    def met(cls) -> Self:
        """Return the agreement of the default process group; all ranks call it, as `session`."""
        return cls(session(), default_store(), dist.get_rank(), dist.get_world_size())

    def part(self, name: str) -> StoreMailbox:
        """The mailbox of these ranks with a name."""
        return StoreMailbox(self.part_store(name))

    def part_store(self, name: str) -> "dist.distributed_c10d.PrefixStore":
        """The part of the store with a name."""
        return dist.distributed_c10d.PrefixStore(f"fastckpt/{self.name}/{name}", self.store)


def job_store_if_met(name: str) -> "dist.distributed_c10d.PrefixStore | None":
    """The part of the process group's store with a name; None before the ranks have met: this waits for none."""
    met = _sessions.get(dist.group.WORLD) if dist.is_initialized() else None
    return None if met is None else _part(f"{met}/{name}")


def forgetting_addresses() -> Callable[[], None]:
    """A function that removes the addresses that gloo has left of this rank in a store that outlives the workers.

    A restarted worker that reads the store before the others have written to it would connect to dead ranks, and fail
    or wait. The addresses are needless once all ranks have formed the groups that this rank has formed by now: call the
    function then.
    """
    place = RankInfo.from_environment()
    if place.gloo_is_lazy or not place.store_outlives_workers:
        return lambda: None  # lazy ranks read addresses when they first communicate: they must stay
    left = [(store, f"cpu//0/{group.rank()}") for group, store in group_stores()]

    def forget() -> None:
        for store, key in left:
            store.delete_key(key)

    return forget


def _part(name: str) -> "dist.distributed_c10d.PrefixStore":
    return dist.distributed_c10d.PrefixStore(f"fastckpt/{name}", default_store())


def _announce(mailbox: StoreMailbox, world: int) -> str:
    """Draw a name, and confirm it to all other ranks when they have come; returns it."""
    name, last = secrets.token_hex(8), mailbox.word(_LAST)
    unconfirmed = mailbox.read(_NAME).message if mailbox.has(_NAME) else None
    mailbox.put(_NAME, name)
    if unconfirmed:  # other ranks of this round may have come to it, and wait
        mailbox.put(_confirmed(unconfirmed), [])
    keys = {rank: f"{name}/{rank}" for rank in range(1, world)}
    _wait_for(mailbox, keys)
    words = mailbox.read_all([*keys.values()])
    # Before it is confirmed: a rank that comes later is one of the next process group, and waits for another name.
    mailbox.remove(_NAME, pieces=1)
    mailbox.put(_confirmed(name), words)
    mailbox.replace_word(_LAST, name)
    # Nobody asks for these any more, because all have come here.
    for each in filter(None, (unconfirmed, last)):
        mailbox.remove(_confirmed(each))
    for rank in keys if unconfirmed else ():
        mailbox.remove(f"{unconfirmed}/{rank}", pieces=1)
    return name


def _wait_for(mailbox: StoreMailbox, keys: Mapping[int, str]) -> None:
    """Return when all ranks have left a message; the log names late ranks."""
    begin = time.monotonic()
    try:
        mailbox.wait([*keys.values()], begin + PATIENCE)
    except TimeoutError:
        logger.warning(
            "still waiting for %s after %g s, and up to %g s: each rank constructs the checkpointers that the "
            "others construct",
            named(rank for rank, key in keys.items() if not mailbox.has(key)),
            PATIENCE,
            TIMEOUT.total_seconds(),
        )
        try:
            mailbox.wait([*keys.values()], begin + TIMEOUT.total_seconds())
        except TimeoutError as error:
            late = named(rank for rank, key in keys.items() if not mailbox.has(key))
            raise dist.DistStoreError(f"{late} did not come in {TIMEOUT.total_seconds():g} s") from error


def _come(mailbox: StoreMailbox, rank: int) -> str:
    """Come to a name that is announced, until one is confirmed with this rank's word; returns it."""
    word, end = secrets.token_hex(8), time.monotonic() + TIMEOUT.total_seconds()
    try:
        while True:
            mailbox.wait([_NAME], end)
            name: str = mailbox.read(_NAME).message  # stays until this rank has come, or is replaced
            mailbox.put(f"{name}/{rank}", word)
            mailbox.wait([_confirmed(name)], end)
            words = mailbox.read(_confirmed(name)).message
            mailbox.remove(f"{name}/{rank}", pieces=1)
            if word in words:
                return name
    except TimeoutError as error:
        raise dist.DistStoreError(f"rank 0 did not come in {TIMEOUT.total_seconds():g} s") from error


def _confirmed(name: str) -> str:
    return f"{name}/confirmed"


def named(numbers: Iterable[int]) -> str:
    """Ranks by their numbers, in words; of many the first ones."""
    first = [*itertools.islice(numbers, MOST_NAMED + 1)]
    more = ", ..." if len(first) > MOST_NAMED else ""
    return f"rank{'s' * (len(first) > 1)} {', '.join(map(str, first[:MOST_NAMED]))}{more}"


def explain_stale_addresses() -> None:
    """Log, in a restarted worker of torchrun, why its process group fails to form, or takes long."""
    try:
        place = RankInfo.from_environment(copy_of_environment())  # at import
    except ConfigError:
        return  # the first checkpointer raises it
    if place.agent or not place.restart_count or not place.store_outlives_workers:
        return
    before, main = sys.excepthook, threading.current_thread().ident

    def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        names = {frame.name for frame in traceback.extract_tb(trace)}
        if FORMING & names and "gloo" in str(error).lower():
            text = coded("gloo could not connect the workers. " + EXPLANATION, "FC-044")
            logger.error(text, place.restart_count)

    def look() -> None:
        frame = sys._current_frames().get(main or 0)
        if FORMING & {each.name for each in traceback.extract_stack(frame)}:
            text = f"the process group is still being formed, {FORMING_PATIENCE:g} s after this worker began. "
            logger.warning(coded(text + EXPLANATION, "FC-044"), place.restart_count)

    sys.excepthook = explain
    timer = threading.Timer(FORMING_PATIENCE, look)
    timer.daemon = True
    timer.start()
