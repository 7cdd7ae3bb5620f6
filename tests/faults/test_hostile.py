"""Other users of the host, and processes that send invalid messages: refused and logged, while the job continues."""

import contextlib
import json
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fastckpt._core.config import AGENT_VARIABLE
from fastckpt._core.ipc.channel import MAX_SIZE, pack
from fastckpt._core.ipc.messages import Hello
from fastckpt._core.memory.telemetry import telemetry_name
from tests.faults.jobs import assert_as_if_nothing_had_happened
from tests.faults.test_signals import assert_agent_answers

NOBODY = 65534
CROWD = 1000


def as_nobody(attack: Callable[[], list[str]]) -> list[str]:
    """What another user's process finds that it can do."""
    if os.getuid() != 0:
        pytest.skip("only root can act as another user")
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, json.dumps(attack()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return json.loads(found)


def connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    connection.settimeout(30)
    return connection


def answer(connection: socket.socket) -> bytes:
    try:
        (length,) = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL) or bytes(4))
        return connection.recv(length, socket.MSG_WAITALL) if length else b""
    except OSError:
        return b""


def allowed(*deeds: tuple[str, Callable[[], object]]) -> list[str]:
    done = []
    for name, deed in deeds:
        with contextlib.suppress(PermissionError):
            deed()
            done.append(name)
    return done


@pytest.fixture
def open_to_all():
    """A checkpoint directory and a tmpfs that every user can reach, as /dev/shm is."""
    shm = Path(os.environ["FASTCKPT_SHM_DIR"])
    shm.chmod(0o1777)
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_another_user_can_reach_neither_memory_nor_sockets(open_to_all, new_job, uninterrupted):
    job = new_job(checkpoint_dir=open_to_all / "checkpoints")
    job.start("--wait-at", "20", FASTCKPT_FILE_MODE="0644")
    job.wait_for_all(20)
    job.until(lambda: job.stored()[:1] == [20], "step 20 on storage")
    address = "\0" + psutil.Process(job.pid(0)).environ()[AGENT_VARIABLE].removeprefix("@")
    arena = job.arena()
    block = Path("/dev/shm") / telemetry_name(arena).strip("/")
    slot = arena / "slot-0"
    assert (slot / "model.pt").exists() and block.exists()
    hello = Hello(str(job.checkpoint_dir), 0, 2, 2, 0, 0)

    def attack() -> list[str]:
        files = (arena / "owner", slot / "model.pt", slot / ".begin", block)
        found = allowed(
            ("list the arena", lambda: os.listdir(arena)),
            ("make a file in the arena", (arena / "slot-9").mkdir),
            ("remove the arena", lambda: arena.rename(arena.with_name("mine"))),
            ("write to storage", (job.checkpoint_dir / "checkpoint-99").mkdir),
            ("read a checkpoint", (job.checkpoint_dir / "checkpoint-20/model.pt").read_bytes),
            *((f"read {path}", path.read_bytes) for path in files),
            *((f"write {path}", lambda path=path: path.open("r+b").close()) for path in files),
        )
        crowd = [connected(address) for _ in range(CROWD)]
        for connection in crowd[:50]:
            with contextlib.suppress(OSError):
                connection.sendall(pack(hello))
        return found + [f"got {text!r}" for connection in crowd if (text := answer(connection))]

    assert as_nobody(attack) == ["read a checkpoint"], "which the mode of files allows"
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", MAX_SIZE + 1), struct.pack("<I", 9) + b"{" * 9):
        with connected(address) as connection:  # of the same user
            connection.sendall(nonsense)
            assert answer(connection) == b"", "it is disconnected"
    assert_agent_answers(job)
    job.go_on(20)
    assert job.wait() == 0, job.text()
    assert 1 <= job.text().count(f"of user {NOBODY}") <= 10, "told, but not a thousand times"
    assert_as_if_nothing_had_happened(job, uninterrupted())
