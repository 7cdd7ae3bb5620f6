"""Fuzz one reader with atheris, guided by coverage: ``targets.py <reader> <folder> -runs=<number>``."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["fastckpt"]):
    from fastckpt._core.format.manifest import Manifest, _digest
    from fastckpt._core.inspect.contents import contents
    from fastckpt._core.inspect.pickled import Tensor
    from fastckpt._core.inspect.tree import tree_of
    from fastckpt._core.inspect.values import elements
    from fastckpt._core.ipc import channel
    from fastckpt._core.ipc import messages as m
    from fastckpt._core.memory import slots
    from fastckpt._core.policy.retention import from_json
    from fastckpt.errors import BadCheckpoint, ProtocolError


def message(data: bytes) -> None:
    """What is understood can be said again; a policy in it is understood or refused."""
    try:
        found = channel.decode(data)
    except ProtocolError:
        return
    assert channel.decode(channel.encode(found)) == found
    if isinstance(found, m.Hello):
        try:
            from_json(found.policy)
        except ProtocolError:
            pass


def signed(data: bytes) -> bytes:
    """The same with the digest that belongs to it, if that is possible."""
    try:
        body = {name: value for name, value in json.loads(data).items() if name != "digest"}
        return json.dumps(body | {"digest": _digest(body)}).encode()
    except (ValueError, RecursionError, AttributeError, BadCheckpoint):
        return data


def manifest(data: bytes) -> None:
    """What is understood can be written again and names files inside alone; the digest is always right."""
    try:
        found = Manifest.from_json(signed(data))
    except BadCheckpoint:
        return
    assert Manifest.from_json(found.to_json()) == found
    assert all(".." not in entry.name.split("/") for entry in found.files)


def records(data: bytes) -> None:
    """A slot whose records are any bytes holds a checkpoint or none."""
    slot = Path(sys.argv[2]).parent / "slot-0"
    slot.mkdir(exist_ok=True)
    begin, _, done = data.partition(b"\n")
    (slot / ".begin").write_bytes(begin)
    (slot / ".done-0").write_bytes(done)
    found = slots.read(slot)
    if found.committed:
        assert all(type(size) is int for size in found.files.values())
        assert isinstance(found.details, dict)


def safetensors(data: bytes) -> None:
    """What is understood is there to its last element, and no more than the file has."""
    name = "model.safetensors"
    try:
        found = contents(io.BytesIO(data), name)
        tensors = [entry.value for entry in tree_of(found.state(), name) if isinstance(entry.value, Tensor)]
        read = sum(block.numel() for tensor in tensors for block in elements(found, tensor))
    except BadCheckpoint as error:
        assert name in str(error)
        return
    assert read == sum(tensor.count for tensor in tensors) <= len(data)


READERS: dict[str, Callable[[bytes], None]] = {
    "message": message,
    "manifest": manifest,
    "records": records,
    "safetensors": safetensors,
}

if __name__ == "__main__":
    atheris.Setup([sys.argv[0], *sys.argv[2:]], READERS[sys.argv[1]])
    atheris.Fuzz()
