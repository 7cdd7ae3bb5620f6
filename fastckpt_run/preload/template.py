"""The process from which workers are forked: it imports, and then only forks; it never computes."""

import gc
import json
import os
import select
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from fastckpt._core.huge_pages import collapse, own_pages
from fastckpt_run.parent_death import die_with
from fastckpt_run.preload.fork_request import DESCRIPTORS, READY
from fastckpt_run.preload.forked_worker import ForkedProcess
from fastckpt_run.preload.imports import ImportPlan, preload
from fastckpt_run.preload.source_watch import PACKAGES, SourceWatch, imported

_MESSAGE = 1 << 20
_SETTLED, _PACE = 5.0, 0.05
"""Seconds after a start until memory is moved into large pages, and from one page to the next: 5 ms of work each."""


def main(ours: str, descriptor: int, agent: int) -> tuple[Callable[[], int], Callable[[int], None]]:
    """Serve the agent at the other end of a socket, until it ends; returns in a worker, with how to run and end it.

    ``ours`` is the entry of the search path where this package is.
    """
    die_with(agent)
    worker = serve(socket.socket(fileno=descriptor), ours)
    return worker.script(), worker.end


def serve(agent: socket.socket, ours: str) -> ForkedProcess:
    """Import the base and the modules of the first message, and fork for each later one; returns in each fork."""
    with _collecting_nothing():
        outcome = preload(lambda: _plan(agent))
    sys.path[:] = [entry for entry in sys.path if entry is not ours]
    # Moves all objects to a generation that is never collected. A collection in a fork would write to each object's
    # head, and so copy the pages that are shared with the template.
    gc.freeze()
    # Workers keep the fastckpt of their agent.
    sources = SourceWatch(imported(besides=("fastckpt", "fastckpt_run", "sitecustomize")) | PACKAGES)
    printed = [os.fstat(descriptor).st_size for descriptor in (1, 2)]
    _answer(agent, asdict(outcome))
    if outcome.fault:
        os._exit(1)
    while True:
        _use_large_pages(agent)
        message, descriptors, _, _ = socket.recv_fds(agent, len(READY), DESCRIPTORS)
        if not message:
            os._exit(0)
        # A worker must run the code that is on disk now, as an executed one would.
        if changed := sources.changed():
            _answer(agent, {"error": f"{changed} has changed since it was imported"})
            continue
        worker = fork(agent, descriptors, printed)
        if worker is not None:
            return worker


def _use_large_pages(agent: socket.socket) -> None:
    """Move this process's memory into large pages, little by little; returns when the agent orders something, or ends.

    A fork copies an entry of a page table for each page, and a process that ends removes them: with large pages that
    takes a quarter of the time. Workers that run keep their small pages, so that until the next start both are in
    memory, 0.2 GB.
    """
    orders = select.poll()  # unlike select(), it takes descriptors above 1023
    orders.register(agent, select.POLLIN)
    pages, pause = own_pages(), _SETTLED
    while not orders.poll(1e3 * pause) and (page := next(pages, None)) is not None:
        collapse(page)
        pause = _PACE


def _plan(agent: socket.socket) -> ImportPlan:
    """The plan that the agent sends; ends this process if it needs none."""
    message = agent.recv(_MESSAGE)
    if not message:
        os._exit(0)
    return ImportPlan(**json.loads(message))


@contextmanager
def _collecting_nothing() -> Iterator[None]:
    """Disable garbage collection: imported objects stay. An import's own changes to the collector count."""
    usual = gc.get_threshold()
    gc.set_threshold(0)
    yield
    if gc.get_threshold()[0] == 0:
        gc.set_threshold(*usual)


def fork(agent: socket.socket, descriptors: list[int], printed: list[int]) -> ForkedProcess | None:
    """Fork a worker and report it to the agent; returns the worker in the worker, else None.

    It is forked from a process that ends at once, so that the agent, the nearest subreaper above, becomes its
    parent. It is reported to the agent when that has happened; then the agent lets the worker go.
    """
    read, write = os.pipe()
    try:
        # 1. fork a process that forks the worker and ends   2. the worker, an orphan, becomes the
        # agent's child   3. its pid goes by way of the pipe to the template, and from there to the agent
        middle = os.fork()
    except OSError as error:
        middle = -1
        _answer(agent, {"error": f"fork: {error.strerror}"})
    if middle == 0:
        try:
            if os.fork():
                os._exit(0)
        except OSError:
            os._exit(1)
        agent.close()  # only the template may hold it: the agent notices its death by the closed socket
        os.setsid()
        os.write(write, str(os.getpid()).encode())
        return ForkedProcess(*descriptors, printed=printed)
    for descriptor in (write, *descriptors):
        os.close(descriptor)
    if middle > 0:
        number = os.read(read, 32)
        with suppress(ChildProcessError):  # the kernel reaps it where SIGCHLD is ignored
            os.waitpid(middle, 0)
        _answer(agent, {"pid": int(number)} if number else {"error": "the fork died at once"})
    os.close(read)
    return None


def _answer(agent: socket.socket, message: dict[str, Any]) -> None:
    try:
        agent.send(json.dumps(message).encode())
    except OSError:
        os._exit(1)  # the agent has gone, or given this process up
