"""Mistakes of users: reported by name in the worker; the next save works, and nothing stays locked."""

import os
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fastckpt.ddp import DdpCheckpointer, SaveResult, StorageType
from tests.e2e.ddp.conftest import Ranks, directory, on_storage, ranks  # noqa: F401 (fixtures)

WHERE = "fastckpt: state['layers'][0]['extra'], a "
CANNOT = "cannot be saved; leave it out, or save plain values or tensors in its place"


class Opaque:
    def __getstate__(self) -> None:
        raise ZeroDivisionError("the user's own error")


def outcome_of(act: Callable[[], Any]) -> str:
    try:
        result = act()
    except Exception as error:  # whatever it is, a user sees it
        return "".join(traceback.format_exception_only(error)).strip().replace("\n", " | ")
    return (result.reason or "saved") if isinstance(result, SaveResult) else str(result)


def of_a_fork(act: Callable[[], Any]) -> str:
    """What becomes of it in a child, such as a loader worker."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, outcome_of(act).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as text:
        return text.read()


def save(member: DdpCheckpointer, step: int, extra: Any = None) -> SaveResult:
    state = {"weights": torch.full((1000,), float(step)), "layers": [{"extra": extra}]}
    return member.save_checkpoint(step, state, storage_type=StorageType.MEMORY)


def test_a_mistake_of_a_script_is_reported_and_the_next_save_works(ranks: Ranks) -> None:  # noqa: F811
    first, second = ranks.start(2)
    opaque = f"ZeroDivisionError: the user's own error | {WHERE}{__name__}.Opaque, {CANNOT}"
    lock = f"TypeError: cannot pickle '_thread.lock' object | {WHERE}_thread.lock, {CANNOT}"
    mistakes = [
        (first, 1, Opaque(), opaque),
        (first, 1, threading.Lock(), lock),
        (second, 1, Opaque(), "saved"),  # its own part is in memory; it does not count
        (first, 0, None, "memory already holds this step"),
        (second, 1, None, "saved"),  # of one rank alone
    ]
    for number, (member, later, extra, told) in enumerate(mistakes):
        step = 10 * number
        assert all(save(each, step) for each in ranks.members)
        assert outcome_of(partial(save, member, step + later, extra)) == told
    prepare = partial(first.prepare, {"weights": torch.ones(3)})
    for act in (partial(save, first, 99), first.load_checkpoint, first.wait_latest_checkpoint, prepare):
        assert "belongs to the process that made it, not to one forked from it" in of_a_fork(act)
    assert all(save(each, 90) for each in ranks.members)
    assert [loaded["weights"][0] for loaded in ranks.load()] == [90, 90]
    ranks.end()
    assert on_storage(ranks.directory) == [90]
