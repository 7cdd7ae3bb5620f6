"""Processes that are killed when an arena is adopted, and processes that never are."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fastckpt._core.memory import presence
from fastckpt._core.memory.locks import close_lock, open_lock, try_exclusive
from fastckpt._core.memory.presence import Presence, evict, forget_the_dead, signed
from fastckpt._core.memory.processes import Process, boot_id, pid_namespace
from fastckpt.errors import ArenaInUse

HOLDER = """
import sys, pathlib, time
from fastckpt._core.memory.presence import Presence
presence = Presence(pathlib.Path(sys.argv[1]))
print("here", flush=True)
time.sleep(600)
"""


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    (tmp_path / "arena").mkdir(mode=0o700)
    return tmp_path / "arena"


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    children: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *map(str, arguments)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout.readline() == "here\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def rewrite(arena: Path, **changes: object) -> None:
    """Let all signatures say something else."""
    for path, process in signed(arena):
        path.write_text(json.dumps(process.to_record() | changes))


def test_a_process_is_identified_by_pid_and_start_time():
    me = Process.current()
    assert me.is_alive() and me.is_here()
    assert Process.from_record(json.loads(json.dumps(me.to_record()))) == me
    assert str(me).startswith(f"process {os.getpid()} on {os.uname().nodename}, started 20")
    for other in (replace(me, ticks=me.ticks - 1), replace(me, boot="another"), replace(me, namespace=1)):
        assert not other.is_alive()
    assert "of another pid namespace" in str(replace(me, namespace=1))


@pytest.mark.parametrize("record", [{}, {"pid": "1"}, {"pid": 1, "ticks": 2, "boot": 3, "namespace": 4}])
def test_an_invalid_signature_names_no_process(record: dict[str, object]):
    assert Process.from_record(record) is None


def test_a_process_is_known_to_be_dead_if_its_pid_namespace_is_gone():
    me = Process.current()
    assert me.init > 0 and me.is_alive() and not me.is_dead()
    assert not replace(me, init=0).is_dead(), "an earlier version has signed"
    ended = replace(me, ticks=me.ticks - 1)
    assert ended.is_here() and ended.is_dead()
    # The container that has its namespace's number now began later: in it, pids and sessions mean others.
    gone = replace(me, init=me.init - 1)
    assert gone.is_dead() and not (gone.is_here() or gone.is_alive() or gone.kill() or gone.left())
    elsewhere = replace(me, namespace=me.namespace + 1)
    assert not (elsewhere.is_dead() or elsewhere.is_alive() or elsewhere.is_here())


def test_a_zombie_counts_as_dead():
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not Process.of(child.pid).is_alive()
    child.wait()


def test_a_writer_that_a_dead_owner_left_is_killed(arena: Path, started):
    child = started(HOLDER, arena)
    ((_, process),) = signed(arena)
    assert (process.pid, process.is_alive()) == (child.pid, True)
    assert evict(arena, 30)
    assert child.wait(30) == -signal.SIGKILL
    assert signed(arena) == []


def test_a_stopped_writer_of_a_dead_owner_is_killed(arena: Path, started):
    child = started(HOLDER, arena)
    child.send_signal(signal.SIGSTOP)
    assert evict(arena, 30)
    assert child.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize(
    "change",
    [
        {"ticks": 5},
        {"boot": "another"},
        {"namespace": 1},
        {"pid": 1},
        {"pid": 0},
        {"pid": -1},
        {"pid": 2**40},
        {"pid": "x"},
    ],
    ids=str,
)
def test_a_process_that_is_not_the_one_that_signed_is_not_killed(arena: Path, started, change: dict[str, object]):
    """Its number was given to another since, say; then the lock says that somebody is there, and that is all."""
    child = started(HOLDER, arena)
    rewrite(arena, **change)
    assert not evict(arena, 0.2)
    assert child.poll() is None


def test_a_process_with_a_reused_pid_is_not_killed(arena: Path, started):
    """A bystander, since the kernel reuses pids: the signature has its pid, and another start time."""
    holder, bystander = started(HOLDER, arena), started("print('here', flush=True); import time; time.sleep(600)")
    rewrite(arena, pid=bystander.pid)
    assert not evict(arena, 0.2)
    assert bystander.poll() is None and holder.poll() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of somebody else")
def test_a_process_of_another_user_is_not_killed_even_by_root():
    other = subprocess.Popen(["sleep", "600"], user=65534)
    try:
        assert Process.of(other.pid).is_alive() and not Process.of(other.pid).kill()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_process_that_signed_and_writes_no_more_is_not_killed(arena: Path, started):
    """Without the lock it is no writer: a script that goes on to something else after it closed its checkpointer."""
    child = started(
        HOLDER.replace('print("here"', 'presence._lock and __import__("os").close(presence._lock)\nprint("here"'), arena
    )
    assert len(signed(arena)) == 1
    assert evict(arena, 0)
    assert child.poll() is None


def test_this_process_does_not_kill_itself(arena: Path):
    writer = Presence(arena)
    assert not evict(arena, 0.05)
    writer.close()
    assert list(arena.iterdir()) == [arena / presence.LOCK]


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
    mine, child = Presence(arena), started(HOLDER, arena)
    child.kill()
    child.wait()
    assert len(signed(arena)) == 2
    forget_the_dead(arena)
    assert [process.pid for _, process in signed(arena)] == [os.getpid()]
    mine.close()


def test_boot_id_and_pid_namespace_are_available():
    assert len(boot_id()) == 36 and pid_namespace() > 0
