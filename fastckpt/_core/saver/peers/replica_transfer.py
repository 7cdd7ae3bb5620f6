"""Large files of a save into the memory of another agent, which keeps them: the request, and both ends of it.

The request `REPLICATE` names the file, its size and its digest. The answer is that the file is kept already, or that
there is no room, or that it may come. Then its bytes follow, and the answer to these reports whether they have the
announced digest. Only then does the file get its name, so that half of one is never there. While memory for it is
allocated, the first answer is `WAIT`, again and again.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.rate import RateLimit
from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.memory.replica_files import ReplicaFiles
from fastckpt._core.memory.slots import is_image
from fastckpt._core.saver.peers.file_transfer import SaveName, received
from fastckpt.errors import ArenaTooSmall, BadCheckpoint, FastckptError, ProtocolError

REPLICATE = "replicate"
STATE, WHY = "state", "why"
READY, KEPT, FULL, BUSY, DAMAGED, WAIT = "ready", "kept", "full", "busy", "damaged", "wait"
SIGNS = 5.0
"""Seconds from one answer to the next while memory is made: up to 4 s for each GB, and one file after the other."""
LARGEST = 1 << 50
"""Bytes that a file may have at most."""


@dataclass(frozen=True)
class LargeFile:
    """A file of a save: its name there, where it is, its bytes, and its xxh3-128 as it was when it was committed."""

    name: str
    path: Path
    size: int
    digest: str


def send_replica(
    connection: SealedConnection,
    save: SaveName,
    file: LargeFile,
    common: SaveId | None,
    rate: RateLimit | None = None,
) -> bool:
    """Have another agent keep a file; returns whether its bytes had to be sent.

    Args:
        connection: To that agent.
        save: Its save.
        file: The file.
        common: The newest save that all nodes hold: that agent may release nothing of it.
        rate: A limit, of this node, on the bytes per second.

    Raises:
        ArenaTooSmall: The other agent has no memory for it.
        BadCheckpoint: The bytes are not those that were announced: memory of one end, or the way, damages bytes.
        FastckptError, OSError: It does not keep it now.
    """
    promise = {"name": file.name, "size": file.size, "digest": file.digest}
    request = save.request(REPLICATE, **promise, common=list(common or ()))
    answer = connection.ask(request)
    while answer.get(STATE) == WAIT:
        answer = connection.answer()
    if answer.get(STATE) == READY:
        connection.send_file(file.path, file.size, rate)
        answer = connection.receive() or {STATE: "hung up"}
        if answer.get(STATE) == KEPT:
            return True
    demand_kept(answer, f"{file.name} of {save.id}")
    return False


def demand_kept(answer: Mapping[str, Any], what: str) -> None:
    """Raise, as `send_replica` does, unless the answer is that another agent keeps the file."""
    match answer:
        case {"state": "kept"}:
            return
        case {"state": "full", "why": str(why)}:
            raise ArenaTooSmall(why)
        case {"state": "damaged"}:
            raise BadCheckpoint(f"{what} arrived with another digest than it has here")
    raise ProtocolError(f"the other agent does not keep {what}: {answer.get(WHY, answer.get(STATE))}")


def take_replica(
    connection: SealedConnection, save: SaveName, request: Mapping[str, Any], files: ReplicaFiles
) -> dict[str, Any]:
    """Carry out `REPLICATE`; raises FastckptError, and OSError, which ends the connection, amid a file."""
    match request:
        case {"name": str(name), "size": int(size), "digest": str(digest), "common": [*common]} if (
            len(common) in (0, 2) and is_image(name) and 0 < size <= LARGEST
        ):
            pass
        case _:
            raise ProtocolError("the request names no file that could be kept")
    if files.has(save.id, save.attempt, name, size, digest):
        return {STATE: KEPT}
    could_release = files.make_way(save.id, SaveId(*map(int, common)) if common else None)
    came = ""
    try:
        with contextlib.ExitStack() as place:
            with _signs(connection):
                descriptor, is_whole = place.enter_context(files.receive(save.id, save.attempt, name, size))
            connection.send({STATE: READY})
            with metrics.phase("replicas.receive", step=save.id.step, image=name):
                came = received(connection, descriptor, size)
            if came == digest:
                is_whole(digest)
    except ArenaTooSmall as error:
        return {STATE: FULL if could_release else BUSY, WHY: str(error)}
    except FastckptError as error:
        if came:
            raise
        raise OSError(str(error)) from error  # amid the bytes, an answer cannot be distinguished from them: hang up
    return {STATE: KEPT if came == digest else DAMAGED}


@contextlib.contextmanager
def _signs(connection: SealedConnection) -> Iterator[None]:
    """Have the other end wait for as long as this takes; nobody else sends meanwhile."""
    is_over = threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):  # it has gone, as is noticed later
            while not is_over.wait(SIGNS):
                connection.send({STATE: WAIT})

    thread = threading.Thread(target=send, name="fastckpt-signs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
