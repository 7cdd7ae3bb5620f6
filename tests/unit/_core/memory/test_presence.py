"""Processes that are killed when an arena is adopted, those that never are, and the memory that they have."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from fastckpt._core.memory import presence
from fastckpt._core.memory.locks import close_lock, open_lock, try_exclusive
from fastckpt._core.memory.presence import Presence, evict, forget_the_dead, signed
from fastckpt._core.memory.processes import Process, boot_id, own_memory, pid_namespace
from fastckpt.errors import ArenaInUse


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    (tmp_path / "arena").mkdir(mode=0o700)
    return tmp_path / "arena"


@pytest.fixture
def started() -> Iterator[Callable[..., ForkProcess]]:
    """Starts a process that does something, and stays."""
    children: list[ForkProcess] = []
    fork = get_context("fork")

    def start(act: Callable[..., object], *arguments: object) -> ForkProcess:
        here = fork.Event()

        def stay() -> None:
            held = act(*arguments)
            here.set()
            time.sleep(600)
            del held

        child = fork.Process(target=stay)
        children.append(child)
        child.start()
        assert here.wait(30)
        return child

    yield start
    for child in children:
        child.kill()
        child.join()


def has_been_killed(child: ForkProcess) -> bool:
    child.join(30)
    return child.exitcode == -signal.SIGKILL


def test_a_process_is_identified_by_pid_and_start_time():
    me = Process.current()
    assert me.is_alive() and me.is_here()
    assert Process.from_record(json.loads(json.dumps(me.to_record()))) == me
    assert str(me).startswith(f"process {os.getpid()} on {os.uname().nodename}, started 20")
    for other in (replace(me, ticks=me.ticks - 1), replace(me, boot="another"), replace(me, namespace=1)):
        assert not other.is_alive()
    assert "of another pid namespace" in str(replace(me, namespace=1))
    for invalid in ({}, {"pid": "1"}, {"pid": 1, "ticks": 2, "boot": 3, "namespace": 4}):
        assert Process.from_record(invalid) is None
    assert len(boot_id()) == 36 and pid_namespace() > 0
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not Process.of(child.pid).is_alive(), "a zombie is dead"
    child.wait()
    assert me.init > 0 and not me.is_dead()
    assert not replace(me, init=0).is_dead(), "an earlier version has signed"
    ended = replace(me, ticks=me.ticks - 1)
    assert ended.is_here() and ended.is_dead()
    # The container that has its namespace's number now began later: in it, pids and sessions mean others.
    gone = replace(me, init=me.init - 1)
    assert gone.is_dead() and not (gone.is_here() or gone.is_alive() or gone.kill() or gone.left())
    elsewhere = replace(me, namespace=me.namespace + 1)
    assert not (elsewhere.is_dead() or elsewhere.is_alive() or elsewhere.is_here())


def test_writers_that_a_dead_owner_left_are_killed_and_who_writes_no_more_is_not(arena: Path, started):
    """Without the lock it is no writer: a script that goes on to something else after it closed its checkpointer."""
    former = started(lambda: os.close(Presence(arena)._lock))
    assert len(signed(arena)) == 1 and evict(arena, 0) and former.is_alive()
    writer, stopped = started(Presence, arena), started(Presence, arena)
    os.kill(stopped.pid, signal.SIGSTOP)
    assert {process.pid for _, process in signed(arena)} >= {writer.pid, stopped.pid}
    assert all(process.is_alive() for _, process in signed(arena))
    former.kill()
    former.join()
    assert evict(arena, 30)
    assert has_been_killed(writer) and has_been_killed(stopped) and signed(arena) == []


CHANGES = [{"ticks": 5}, {"boot": "another"}, {"namespace": 1}, *({"pid": pid} for pid in (1, 0, -1, 2**40, "x"))]


def test_a_process_that_is_not_the_one_that_signed_is_not_killed(arena: Path, started):
    """Its number was given to another since, say; then the lock says that somebody is there, and that is all."""
    holder, bystander = started(Presence, arena), started(int)
    ((path, process),) = signed(arena)
    for change in (*CHANGES, {"pid": bystander.pid}):
        path.write_text(json.dumps(process.to_record() | change))
        assert not evict(arena, 0.05), change
        assert bystander.is_alive() and holder.is_alive(), change


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of somebody else")
def test_a_process_of_another_user_is_not_killed_even_by_root():
    other = subprocess.Popen(["sleep", "600"], user=65534)
    try:
        assert Process.of(other.pid).is_alive() and not Process.of(other.pid).kill()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_writer_waits_for_one_that_only_looks_and_not_for_ever(arena: Path, monkeypatch: pytest.MonkeyPatch):
    lock = open_lock(arena / presence.LOCK)
    assert try_exclusive(lock)
    monkeypatch.setattr(presence, "DEADLINE", 0.05)
    with pytest.raises(ArenaInUse, match=r"keeps .*writers locked for itself; end it"):
        Presence(arena)
    assert signed(arena) == []
    monkeypatch.setattr(presence, "DEADLINE", 30.0)
    threading.Timer(0.2, close_lock, (lock,)).start()
    Presence(arena).close()


def test_only_signatures_of_dead_processes_are_removed(arena: Path, started):
    """And this process does not kill itself."""
    mine, child = Presence(arena), started(Presence, arena)
    child.kill()
    child.join()
    assert len(signed(arena)) == 2
    forget_the_dead(arena)
    assert [process.pid for _, process in signed(arena)] == [os.getpid()]
    assert not evict(arena, 0.05)
    threading.Timer(0.1, mine.close).start()
    assert evict(arena, 30) and list(arena.iterdir()) == [arena / presence.LOCK]


def test_pages_that_forked_processes_share_count_in_each_as_they_stop_to_share_them_when_they_exit():
    if (child := os.fork()) == 0:
        time.sleep(600)
    both, one = own_memory(os.getpid()), own_memory(child)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert both > 1.9 * one > 0 and own_memory(child) == 0
