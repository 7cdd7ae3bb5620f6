"""A chunk of a node's large files into the parity of another node: the request, and both ends of it.

The request `PARITY` names the group, the member and its files. The answer is that the chunk is in the parity already,
or that there is no room, or the piece from which on it may come. Each piece is followed by its digest, and answered:
only undamaged pieces are in the XOR.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from fastckpt._core import metrics
from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.rate import RateLimit
from fastckpt._core.ipc.sealed import SealedConnection, reading
from fastckpt._core.memory.parity_records import files_in
from fastckpt._core.memory.slots import is_image
from fastckpt._core.policy.replicas.grouping import Group
from fastckpt._core.policy.replicas.parity_layout import FileRange, length_of, pieces, ranges_for
from fastckpt._core.saver.peers.common_saves import CommonSave
from fastckpt._core.saver.peers.file_transfer import SaveName, received_into
from fastckpt._core.saver.peers.parity_files import ChunkRequest, ParityFiles
from fastckpt._core.saver.peers.parity_place import ParityPlace
from fastckpt._core.saver.peers.replica_transfer import (
    BUSY,
    DAMAGED,
    FULL,
    KEPT,
    LARGEST,
    READY,
    STATE,
    WHY,
    LargeFile,
    demand_kept,
)
from fastckpt.errors import ArenaTooSmall, FastckptError, ProtocolError

PARITY = "parity"
NEXT = "next"
SMALLEST_PIECE = 1 << 16
"""Bytes of a piece, at least: all pieces of a chunk are listed before the first is sent."""
LARGEST_GROUP = 64
"""Members of a group, at most."""
BLOCK = 256 << 10
"""Bytes that are read and digested at once: they are in the processor's cache then."""


def send_chunk(
    connection: SealedConnection,
    save: SaveName,
    files: Sequence[LargeFile],
    group: Group,
    pair: tuple[str, str],
    common: CommonSave,
    rate: RateLimit | None = None,
) -> int:
    """Have another agent take this node's chunk into its parity; returns the bytes that were sent.

    Args:
        connection: To that agent.
        save: The save of the files.
        files: All large files that this node alone has; there may be none.
        group: The ids of the agents of the group.
        pair: The ids of this agent and of that one.
        common: The newest save that all nodes hold. That agent may release nothing of it but parity of earlier groups,
            if that of this round's is whole.
        rate: A limit, of this node, on the bytes per second.

    Raises:
        ArenaTooSmall: The other agent has no memory for it.
        BadCheckpoint: The bytes are not those that were sent.
        FastckptError, OSError: It does not take it now.
    """
    member, holder = pair
    named = [[file.name, file.size, file.digest] for file in files]
    known = {"common": list(common.id or ()), "replicated": common.is_replicated}
    answer = connection.ask(save.request(PARITY, group=[*group], member=member, holder=holder, files=named, **known))
    sent, paths = 0, {file.name: file.path for file in files}
    if answer.get(STATE) == READY:
        ranges = ranges_for(group, member, holder, [(file.name, file.size) for file in files])
        with reading("the answer"):
            piece_size, first = int(answer["piece"]), int(answer["first"])
        if piece_size < SMALLEST_PIECE:
            raise ProtocolError(
                f"the other agent asks for pieces of {piece_size} bytes: {SMALLEST_PIECE} are the fewest"
            )
        for piece in pieces(ranges, piece_size)[max(0, first) :]:
            for name, offset, length in piece:
                connection.send_file(paths[name], length, rate, start=offset)
            with metrics.phase("parity.digest", step=save.id.step):
                digest = digest_of(paths, piece)
            answer = connection.ask({"digest": digest})
            sent += length_of(piece)
            if answer.get(STATE) != NEXT:
                break
    demand_kept(answer, f"a piece of {save.id} for the parity at {holder}")
    return sent


def take_chunk(
    connection: SealedConnection, save: SaveName, request: Mapping[str, Any], parity: ParityFiles
) -> dict[str, Any]:
    """Carry out `PARITY`; raises FastckptError, and OSError, which ends the connection, amid a chunk."""
    wanted = _request(save, request)
    member = wanted.member
    try:
        place = parity.admit(wanted)
    except ArenaTooSmall as error:
        return {STATE: FULL if parity.could_release else BUSY, WHY: str(error)}
    if place is None:
        return {STATE: KEPT}
    first = place.missing(member)
    connection.send({STATE: READY, "first": first, "piece": place.record.piece})
    try:
        return _take_pieces(connection, place, member, first, parity)
    except ArenaTooSmall as error:  # after a whole piece
        return {STATE: FULL, WHY: str(error)}
    except FastckptError as error:
        raise OSError(str(error)) from error  # amid the bytes, an answer cannot be distinguished from them: hang up


def _take_pieces(
    connection: SealedConnection, place: ParityPlace, member: str, first: int, parity: ParityFiles
) -> dict[str, Any]:
    piece, size = place.record.piece, place.record.size(member)
    buffer = bytearray(min(piece, size - first * piece))
    with metrics.phase("parity.receive", step=place.id.step), memoryview(buffer) as view:
        for number in range(first, -(-size // piece)):
            with view[: min(piece, size - number * piece)] as data:
                digest = received_into(connection, data)
                if (tail := connection.receive()) is None:
                    raise ProtocolError("the other agent has hung up before a digest")
                if tail.get("digest") != digest:
                    return {STATE: DAMAGED}
                with metrics.phase("parity.add", step=place.id.step):
                    place.add(member, number, data, digest)
            if (number + 1) * piece < size:
                connection.send({STATE: NEXT})
    parity.came(place)
    return {STATE: KEPT}


def _request(save: SaveName, request: Mapping[str, Any]) -> ChunkRequest:
    match request:
        case {"group": [*group], "member": str(member), "holder": str(holder), "files": files, "common": [*common]} if (
            1 < len(group) <= LARGEST_GROUP
            and sorted(set(map(str, group))) == group
            and member != holder
            and {member, holder} <= {*group}
            and len(common) in (0, 2)
        ):
            found, newest = files_in(files), SaveId(*map(int, common)) if common else None
            if all(is_image(name) and size <= LARGEST for name, size, _ in found):
                of = save.id, save.attempt, tuple(group), holder, member
                return ChunkRequest(*of, found, newest, request.get("replicated") is True)
    raise ProtocolError("the request names no chunk that could be taken into parity")


def digest_of(paths: Mapping[str, Path], ranges: Sequence[FileRange]) -> str:
    """The xxh3-128 of ranges of files, one after the other; raises OSError if there are fewer bytes."""
    digest, buffer = xxhash.xxh3_128(), bytearray(BLOCK)
    for name, start, length in ranges:
        descriptor = os.open(paths[name], os.O_RDONLY | os.O_CLOEXEC)
        try:
            offset = start
            while offset < start + length:
                with memoryview(buffer)[: start + length - offset] as block:
                    if not (count := os.preadv(descriptor, [block], offset)):
                        raise OSError(f"{paths[name]} has fewer than {start + length} bytes")
                    digest.update(block[:count])
                offset += count
        finally:
            os.close(descriptor)
    return digest.hexdigest()
