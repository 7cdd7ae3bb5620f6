"""Files of a lost node from the parity of its group: three ends.

The agent that wants them asks each remaining member to `REBUILD` a chunk from its parity. This member asks the others
for their chunks in the same parity (`CHUNK`) and sends the result of the XOR, piece by piece. So the members receive at
the same time, each fewer bytes than a node has, and the agent that wants the files receives them once. A chain of
partial sums would carry as many bytes, and one slow member would hold up all of it. Each piece is compared with the
digest that it had when it went in, and each file with its own.
"""

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from fastckpt._core import metrics
from fastckpt._core.io.direct import digest_file
from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.memory import slots
from fastckpt._core.memory.held_saves import HeldSave
from fastckpt._core.memory.pages import allocate
from fastckpt._core.memory.parity_records import Files, ParityRecord, files_in
from fastckpt._core.memory.slots import is_image
from fastckpt._core.policy.replicas.grouping import Group
from fastckpt._core.policy.replicas.parity_layout import FileRange, length_of, pieces, ranges_for
from fastckpt._core.saver.peers.file_transfer import TIMEOUT, SaveName, received_into
from fastckpt._core.saver.peers.parity_files import ParityFiles
from fastckpt._core.saver.peers.parity_place import xor_into
from fastckpt._core.saver.peers.parity_transfer import BLOCK
from fastckpt.errors import BadCheckpoint, FastckptError, ProtocolError

logger = logging.getLogger("fastckpt")

CHUNK, REBUILD = "parity chunk", "rebuild"


# --- a member that is left, asked for its chunk


def serve_chunk(connection: SealedConnection, held: HeldSave, request: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out `CHUNK`: send ranges of files of a save; raises FastckptError if they are not there."""
    match request.get("ranges"):
        case [*values]:
            ranges = [FileRange(str(name), int(offset), int(length)) for name, offset, length in values]
        case _:
            raise ProtocolError("the request names no ranges of files")
    for name, offset, length in ranges:
        if offset < 0 or length < 0 or offset + length > held.sizes.get(name, -1):
            raise FastckptError(f"{name} of {held.id} is not in the memory of this node")
        if damage := slots.damage(held.roots[name], {name: held.sizes[name]}):
            raise BadCheckpoint(damage)
    connection.send({"size": length_of(ranges)})
    for name, offset, length in ranges:
        connection.send_file(held.files[name], length, start=offset)
    return {"sent": True}


# --- a remaining member, asked for a chunk from its parity


def serve_rebuilt(
    connection: SealedConnection,
    save: SaveName,
    request: Mapping[str, Any],
    parity: ParityFiles,
    secret: bytes,
) -> dict[str, Any]:
    """Carry out `REBUILD`: send the chunk of a lost member.

    Raises FastckptError if it cannot be rebuilt, and OSError, which ends the connection, amid the bytes.

    Args:
        connection: To the agent that asks.
        save: The save.
        request: Its message.
        parity: The parity that this node holds.
        secret: The secret of the round.
    """
    match request:
        case {"member": str(lost), "group": [*group], "addresses": dict(addresses)}:
            block, record = parity.find(save.id, save.attempt, lost, tuple(group))
        case _:
            raise ProtocolError("the request names no member of a group")
    others = [member for member in record.others if member != lost]
    if missing := [member for member in others if member not in addresses]:
        raise FastckptError(f"{missing[0]} is lost, too: files of {lost} cannot be rebuilt from parity")
    with contextlib.ExitStack() as on_exit:
        links = {
            member: on_exit.enter_context(_chunk_of(save, record, member, addresses[member], secret))
            for member in others
            if record.size(member)
        }
        descriptor = os.open(block, os.O_RDONLY | os.O_CLOEXEC)
        on_exit.callback(os.close, descriptor)
        files = [list(file) for file in record.members[lost].files]
        connection.send({"own": record.own, "files": files})
        try:
            with metrics.phase("parity.rebuild", step=save.id.step):
                for data in _rebuilt(record, lost, descriptor, links):
                    connection.send_bytes(data)
        except FastckptError as error:
            logger.warning("files of another node in %s cannot be rebuilt from parity: %s", save.id, error)
            raise OSError(str(error)) from error  # its bytes are on their way: hang up
    return {"rebuilt": True}


@contextlib.contextmanager
def _chunk_of(
    save: SaveName, record: ParityRecord, member: str, address: str, secret: bytes
) -> Iterator[SealedConnection]:
    """A connection on which the chunk of a member comes."""
    try:
        link = SealedConnection.connect(address, secret, TIMEOUT)
    except OSError as error:
        raise FastckptError(f"{member} does not answer: {error}") from error
    with contextlib.closing(link):
        ranges = [list(each) for each in record.ranges(member)]
        try:
            head = link.ask(save.request(CHUNK, ranges=ranges))
        except OSError as error:
            raise FastckptError(f"{member} does not answer: {error}") from error
        if head.get("size") != record.size(member):
            raise ProtocolError(f"{member} has other files of {save.id} now")
        yield link


def _rebuilt(
    record: ParityRecord, lost: str, descriptor: int, links: Mapping[str, SealedConnection]
) -> Iterator[bytearray]:
    """The pieces of a lost chunk, each as it was when it went into the parity; raises FastckptError or OSError."""
    piece, size = record.piece, record.size(lost)
    for number, digest in enumerate(record.members[lost].digests):
        data = bytearray(os.pread(descriptor, min(piece, size - number * piece), number * piece))
        for member, link in links.items():
            if (count := min(piece, record.size(member) - number * piece)) <= 0:
                continue
            with memoryview(bytearray(count)) as other, memoryview(data) as view:
                if received_into(link, other) != record.members[member].digests[number]:
                    raise BadCheckpoint(f"a piece of {member} is not what went into the parity")
                length = min(count, len(data))
                xor_into(view[:length], other[:length])
        if xxhash.xxh3_128_hexdigest(data) != digest:
            raise BadCheckpoint(f"piece {number} of {lost} is not what went into the parity: that is damaged")
        yield data


# --- the agent that wants the files


@dataclass(frozen=True)
class _Source:
    link: SealedConnection
    holder: str
    files: Files


def rebuild(
    save: SaveName, member: str, group: Group, root: Path, holders: Mapping[str, str], secret: bytes
) -> dict[str, str]:
    """Rebuild the large files of a lost member in a directory of shared memory; returns their xxh3-128, by name.

    Raises FastckptError or OSError if one of its group is missing, or something is damaged: then no file is there.

    Args:
        save: The save.
        member: The member that is lost, or has damaged files.
        group: Its group, as it was when the parity was made.
        root: The directory.
        holders: By each other member, where its memory is now: its agent may be another than then.
        secret: The secret of the round.
    """
    # 1. all remaining members report their records of its files   2. memory for these   3. the chunks, all at once
    # 4. the files' own digests, because those of the chunks are of the sent bytes   5. their names
    with contextlib.ExitStack() as on_exit:
        if sorted([member, *holders]) != sorted(group):
            raise FastckptError(f"two nodes of the group of {member} are lost: its files cannot be rebuilt from parity")
        request = save.request(REBUILD, member=member, group=[*group], addresses=dict(holders))
        sources = [_source(on_exit, request, address, secret) for address in holders.values()]
        files = _agreed(sources, group, member)
        token = secrets.token_hex(4)
        paths = {name: (root / name).with_name(f".new-{token}-{Path(name).name}") for name, _, _ in files}
        descriptors = {}
        for name, size, _ in files:
            paths[name].parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptors[name] = os.open(paths[name], os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            on_exit.callback(_remove, descriptors[name], paths[name])
            if size:
                allocate(descriptors[name], size)
        sizes = [(name, size) for name, size, _ in files]
        with metrics.phase("parity.fetch", step=save.id.step), ThreadPoolExecutor(len(sources)) as pool:
            ranges = [ranges_for(group, member, source.holder, sizes) for source in sources]
            for _ in pool.map(_bring, sources, ranges, [descriptors] * len(sources)):
                pass
        for name, _, digest in files:
            if (now := digest_file(paths[name])) != digest:
                raise BadCheckpoint(f"{name} of {save.id} was rebuilt with the xxh3-128 {now}, not {digest}")
        for name, path in paths.items():
            path.rename(root / name)
    return {name: digest for name, _, digest in files}


def _source(on_exit: contextlib.ExitStack, request: dict[str, Any], address: str, secret: bytes) -> _Source:
    link = on_exit.enter_context(contextlib.closing(SealedConnection.connect(address, secret, TIMEOUT)))
    match link.ask(request):
        case {"own": str(own), "files": files}:
            found = files_in(files)
            if all(is_image(name) for name, _, _ in found):
                return _Source(link, own, found)
    raise ProtocolError("the other agent does not say what it rebuilds")


def _agreed(sources: Sequence[_Source], group: Group, member: str) -> Files:
    """The files that all members that are left name; raises ProtocolError if they do not agree."""
    is_of_all = sorted([member, *(source.holder for source in sources)]) == sorted(group)
    if not is_of_all or len({source.files for source in sources}) != 1:
        raise ProtocolError(f"the members of the group of {member} do not agree on its files")
    return sources[0].files


def _bring(source: _Source, ranges: Sequence[FileRange], descriptors: Mapping[str, int]) -> None:
    """Receive a chunk into its ranges of files."""
    buffer = bytearray(min(BLOCK, length_of(ranges)))
    for piece in pieces(ranges, BLOCK):
        for name, offset, length in piece:
            with memoryview(buffer)[:length] as data:
                received_into(source.link, data)
                os.pwrite(descriptors[name], data, offset)
    metrics.counts["peers.bytes"] += length_of(ranges)
    if not (source.link.receive() or {}).get("rebuilt"):
        raise ProtocolError("the other agent has hung up")


def _remove(descriptor: int, path: Path) -> None:
    os.close(descriptor)
    path.unlink(missing_ok=True)
