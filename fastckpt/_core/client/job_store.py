"""The job's own keys in the store that formed the process group, without messages of an earlier round."""

import logging
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fastckpt._core.config import RankInfo, copy_of_environment
from fastckpt._core.torch_private.tensors import default_store, group_stores
from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt")

TIMEOUT = timedelta(hours=1)
"""The time that the slowest rank may take to verify its files, which may mean to download them, and to load them.

A rank that dies or gives up is not waited for so long: its launcher ends the others.
"""
GLANCE = timedelta(seconds=2)
"""The longest wait in the store, in which Python handles no signal."""
PATIENCE = 60.0
"""Seconds until the log names missing ranks: perhaps they never construct a checkpointer."""
LONGEST_PAUSE = 0.05
"""Seconds, at most, between two checks of the first rank for others that have come."""

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

_sessions: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_turn = threading.Lock()


def session() -> str:
    """The name of this process group, which no other one has ever had; all ranks call it together the first time.

    torchrun keeps its store while workers are restarted, and a process may form one group after another in the same
    store. Restart counts do not distinguish these, because agents of several nodes count independently; nor do keys of
    an earlier first rank. So each rank asks with a random word, and the first rank, which has drawn the name, answers
    under that word: the answer reaches only live ranks, because no other process waits for it.

    Raises torch's DistStoreError if a rank does not come within `TIMEOUT`.
    """
    with _turn:  # checkpointers of several threads must not ask twice: the first rank answers each rank once
        group = dist.group.WORLD
        if group not in _sessions:
            store = _part("meet")
            _sessions[group] = _give(store, dist.get_world_size()) if dist.get_rank() == 0 else _ask(store)
        return _sessions[group]


def job_stores(*names: str) -> tuple[str, list["dist.distributed_c10d.PrefixStore"]]:
    """The name of this process group, and the parts of its store of these names; all ranks call it, as `session`."""
    met, store = session(), default_store()
    return met, [dist.distributed_c10d.PrefixStore(f"fastckpt/{met}/{name}", store) for name in names]


def job_store_if_met(name: str) -> "dist.distributed_c10d.PrefixStore | None":
    """The same, for a rank that others do not wait for; None before the ranks have met."""
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


def _give(store: "dist.distributed_c10d.Store", world: int) -> str:
    """Answer all other ranks, also past ones that left a question when they died; returns the name."""
    name, begin, pause, has_warned = secrets.token_hex(8), time.monotonic(), 0.001, False
    asked = dict.fromkeys(range(1, world), "")
    while True:
        _answer(store, asked, name)
        waited = time.monotonic() - begin
        if not asked:
            return name
        if waited > TIMEOUT.total_seconds():
            raise dist.DistStoreError(f"{_ranks(asked)} did not come in {TIMEOUT.total_seconds():g} s")
        if waited > PATIENCE and not has_warned:
            has_warned = True
            logger.warning(
                "still waiting for %s after %g s, and up to %g s: each rank constructs the checkpointers that the "
                "others construct",
                _ranks(asked),
                PATIENCE,
                TIMEOUT.total_seconds(),
            )
        time.sleep(pause)
        pause = min(1.2 * pause, LONGEST_PAUSE)


def _answer(store: "dist.distributed_c10d.Store", asked: dict[int, str], name: str) -> None:
    """Answer new words of ranks, and drop from ``asked`` the ranks that have taken their answers."""
    for rank, word in list(asked.items()):
        # The asking rank deletes its answer. One that nobody deletes was for a dead rank, whose successor asks with
        # another word under the same key.
        if word and not store.check([f"answer/{word}"]):
            store.compare_set(f"ask/{rank}", word, "")
            del asked[rank]
        elif store.check([f"ask/{rank}"]) and (now := store.get(f"ask/{rank}").decode()) not in ("", word):
            if word:
                store.delete_key(f"answer/{word}")
            store.set(f"answer/{now}", name)
            asked[rank] = now


def _ranks(numbers: Iterable[int]) -> str:
    first = [*numbers][: MOST_NAMED + 1]
    more = ", ..." if len(first) > MOST_NAMED else ""
    return f"rank{'s' * (len(first) > 1)} {', '.join(map(str, first[:MOST_NAMED]))}{more}"


def _ask(store: "dist.distributed_c10d.Store") -> str:
    word, end = secrets.token_hex(8), time.monotonic() + TIMEOUT.total_seconds()
    store.set(f"ask/{dist.get_rank()}", word)
    while True:
        try:
            store.wait([f"answer/{word}"], GLANCE)
            break
        except RuntimeError as error:  # each kind of store has its own for this
            if "timeout" not in str(error).lower() or time.monotonic() > end:
                raise
    name: str = store.get(f"answer/{word}").decode()
    store.delete_key(f"answer/{word}")
    return name


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
            logger.error("gloo could not connect the workers. " + EXPLANATION, place.restart_count)

    def look() -> None:
        frame = sys._current_frames().get(main or 0)
        if FORMING & {each.name for each in traceback.extract_stack(frame)}:
            text = f"the process group is still being formed, {FORMING_PATIENCE:g} s after this worker began. "
            logger.warning(text + EXPLANATION, place.restart_count)

    sys.excepthook = explain
    timer = threading.Timer(FORMING_PATIENCE, look)
    timer.daemon = True
    timer.start()
