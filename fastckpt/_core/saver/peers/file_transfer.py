"""Files of a save from one agent's memory to another's: the requests, and their handlers.

A request names directory, save and attempt. The answer to `LIST` has the save's files on that agent; that to `GET` is
the size of a file, its bytes, and then the digest of the sent bytes.
"""

import contextlib
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from fastckpt._core.byte_sizes import binary
from fastckpt._core.format.ids import SaveId
from fastckpt._core.huge_pages import is_in_memory
from fastckpt._core.io.direct import digest_file
from fastckpt._core.io.rate import RateLimit
from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.memory import slots
from fastckpt._core.memory.headroom import unreserved
from fastckpt._core.memory.held_saves import HeldSave, held_saves, keep
from fastckpt._core.memory.pages import write_out
from fastckpt._core.memory.records import remove_any
from fastckpt._core.memory.slots import SlotDone
from fastckpt._core.policy.replicas.copy_sizes import SMALL
from fastckpt.errors import ArenaTooSmall, BadCheckpoint, FastckptError, ProtocolError

LIST, GET, KEEP = "list", "get", "keep"
MOST_FILES = 1024
"""Files of ranks of one node."""
ON_DISK = 4 << 20
"""Bytes that are received, or read, before they are written to a disk."""
TIMEOUT = 30.0
"""Seconds of silence after which another agent counts as gone."""


@dataclass(frozen=True)
class SaveName:
    """Name of a save among all directories and attempts.

    Attributes:
        directory: The checkpoint directory.
        attempt: The token that ranks of all nodes share from one load to the next.
    """

    directory: str
    id: SaveId
    attempt: str

    def request(self, ask: str, **more: Any) -> dict[str, Any]:
        """A request that names this save."""
        return {"ask": ask, "directory": self.directory, "id": list(self.id), "attempt": self.attempt, **more}

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> "SaveName":
        """The save that a request names; raises ProtocolError."""
        match request:
            case {"directory": str(directory), "id": [int(history), int(step)], "attempt": str(attempt)}:
                return cls(directory, SaveId(history, step), attempt)
        raise ProtocolError("the request names no save")


def digest_of_bytes(data: bytes) -> str:
    """The xxh3-128 of the bytes of a file."""
    return xxhash.xxh3_128_hexdigest(data)


# --- the agent that has the files


def find(arena: Path, of: Sequence[Path], name: SaveName) -> HeldSave:
    """Return the part of a save that an arena holds; raises FastckptError if it holds nothing."""
    for held in held_saves(arena, of):
        if (held.id, held.attempt) == (name.id, name.attempt):
            return held
    raise FastckptError(f"{name.id} is not in the memory of this node any more")


def listing(held: HeldSave) -> dict[str, Any]:
    """The answer to `LIST`."""
    parts = {str(rank): {"files": part.files, "details": part.details} for rank, part in held.parts.items()}
    own = sorted(held.own_files)
    return {
        "files": dict(held.sizes),
        "digests": dict(held.digests),
        "parts": parts,
        "common": sorted(held.common),
        "own": own,
    }


def serve(connection: SealedConnection, held: HeldSave, name: object, rate: RateLimit | None = None) -> dict[str, Any]:
    """Send a file of a save; the answer that follows it has the digest. Raises FastckptError if there is none."""
    if not isinstance(name, str) or name not in held.sizes:
        raise FastckptError(f"{name} is no file of {held.id} in the memory of this node")
    path, size = held.files[name], held.sizes[name]
    if damage := slots.damage(held.roots[name], {name: size}):
        raise BadCheckpoint(damage)
    # Opened before its size is sent: from then on there is no other answer than its bytes.
    with _refusing(f"{name} of {held.id}"):
        file = path.open("rb")
    with file:
        connection.send({"size": size})
        connection.send_open_file(file, size, rate)
    with _refusing(f"{name} of {held.id}"):
        now, known = digest_file(path), held.digests.get(name, "")
    if known not in ("", now):
        raise OSError(f"{path} is damaged: its xxh3-128 is {now}, not {known}")  # hang up: its bytes are on their way
    # A save may have begun in its slot meanwhile: then the sent bytes are of no save.
    still = held.slot is None or held.roots[name] != held.slot or slots.read(held.slot).committed == held.id
    return {"digest": now, "held": still}


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Answer why something cannot be read: a node that hangs up counts as lost, with all that it has."""
    try:
        yield
    except OSError as error:
        raise FastckptError(f"{what} cannot be read there: {error}") from error


def contents_of(connection: SealedConnection, request: Mapping[str, Any]) -> dict[str, bytes]:
    """Receive the files that follow a request to keep them; raises OSError, which ends the connection, if unfit."""
    match request.get("files"):
        case [*files] if len(files) <= MOST_FILES and all(map(_is_small, files)):
            return {name: connection.receive_bytes(size) for name, size in files}
    raise OSError("the files that follow are too many, or too large")


def _is_small(file: object) -> bool:
    match file:
        case [str(), int(size)]:
            return 0 <= size <= SMALL
    return False


def take(arena: Path, save: SaveName, request: Mapping[str, Any], contents: Mapping[str, bytes]) -> None:
    """Keep the small files of another node's ranks; raises FastckptError or ValueError."""
    parts = parts_of(request)
    digests = {name: digest_of_bytes(data) for name, data in contents.items()}
    if digests != request["digests"]:
        raise ProtocolError("the files that came are not those that were sent")
    # Above the limit of a cgroup this process would be killed.
    if (size := sum(map(len, contents.values()))) > (room := unreserved(arena.parent)).free:
        raise FastckptError(f"they cannot be kept: {binary(size)} do not fit: {room}")
    try:
        keep(arena, save.id, save.attempt, parts, contents, digests)
    except OSError as error:
        raise FastckptError(f"they cannot be kept: {error}") from error


def parts_of(message: Mapping[str, Any]) -> dict[int, SlotDone]:
    """The done records of ranks in a message; raises ProtocolError if they are none."""
    match message:
        case {"parts": dict(parts)}:
            id = SaveId(*message["id"]) if "id" in message else None
            found = {int(rank): slots.as_done(part, id) for rank, part in parts.items()}
            if all(found.values()):
                return {rank: part for rank, part in found.items() if part}
    raise ProtocolError("the message has no records of ranks")


# --- the agent that wants them


def give(connection: SealedConnection, name: SaveName, held: HeldSave, contents: Mapping[str, bytes]) -> None:
    """Have another agent keep these files of ranks of this node; raises FastckptError or OSError."""
    digests = {each: digest_of_bytes(data) for each, data in contents.items()}
    sizes = [[each, len(data)] for each, data in contents.items()]
    parts = listing(held)["parts"]
    connection.send(name.request(KEEP, parts=parts, files=sizes, digests=digests))
    for data in contents.values():
        connection.send_bytes(data)
    answer = connection.receive()
    if not answer or not answer.get("kept"):
        raise ProtocolError(str((answer or {}).get("refused", "the other agent has hung up")))


def ask_for(connection: SealedConnection, save: SaveName, name: str, size: int, **more: Any) -> None:
    """Ask for a file: its bytes come next; raises as `fetch`."""
    head = connection.ask(save.request(GET, name=name, **more))
    if head.get("size") != size:
        raise BadCheckpoint(f"{name} of {save.id} has {head.get('size')} bytes there; it was committed with {size}")


def fetch(connection: SealedConnection, save: SaveName, name: str, size: int, root: Path) -> str:
    """Receive a file into a directory of shared memory; returns its xxh3-128.

    Raises:
        OSError, ProtocolError: The other agent is gone, or has it no more.
        BadCheckpoint: The bytes are not those that the other agent has committed.
    """
    ask_for(connection, save, name, size)
    path = root / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".new-{path.name}")
    remove_any(temporary)
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Reserved first: a write into a mapping for which there is no memory would kill this process.
        os.posix_fallocate(fd, 0, max(1, size))
        os.ftruncate(fd, size)
        digest = received(connection, fd, size)
        tail = connection.answer()
        if not tail.get("held"):
            raise BadCheckpoint(f"{save.id} is not in the memory of the other node any more")
        if tail.get("digest") != digest:
            raise BadCheckpoint(f"{name} of {save.id} came damaged: its xxh3-128 is {digest}, not {tail.get('digest')}")
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(fd)
    return digest


def received(connection: SealedConnection, fd: int, size: int) -> str:
    """Receive the bytes of a file with allocated memory, or disk; returns their xxh3-128.

    Raises OSError or ProtocolError, and, once all have been received, ArenaTooSmall if a disk has not taken them.
    """
    if not size:
        return xxhash.xxh3_128().hexdigest()
    if not is_in_memory(fd):
        return _received_on_disk(connection, fd, size)
    with mmap.mmap(fd, size) as mapped, memoryview(mapped) as view:
        return received_into(connection, view)


def _received_on_disk(connection: SealedConnection, fd: int, size: int) -> str:
    # No mapping: a disk that fails would kill this process. The rest is received all the same, so that the other agent
    # learns why.
    digest, failure = xxhash.xxh3_128(), None
    with memoryview(bytearray(min(ON_DISK, size))) as buffer:
        for offset in range(0, size, ON_DISK):
            with buffer[: size - offset] as block:
                filled = 0
                while filled < len(block):
                    with block[filled:] as rest:
                        filled += connection.receive_into(rest)
                digest.update(block)
                try:
                    if failure is None:
                        write_out(fd, block, offset)
                except OSError as error:
                    failure = error
    if failure is not None:
        raise ArenaTooSmall(f"a copy of {binary(size)} cannot be written: {failure}")
    return digest.hexdigest()


def received_into(connection: SealedConnection, data: memoryview) -> str:
    """Receive bytes until memory is full; returns their xxh3-128. Raises OSError or ProtocolError."""
    digest, offset = xxhash.xxh3_128(), 0
    while offset < len(data):
        with data[offset:] as rest:
            count = connection.receive_into(rest)
        with data[offset : offset + count] as block:
            digest.update(block)
        offset += count
    return digest.hexdigest()
