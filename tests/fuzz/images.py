"""Load damaged images, in a process of its own: ``images.py <folder> <examples> <good image>...``.

Prints how many were loaded, and how many refused by which error. Any other end is a defect: the image that was
loaded last is in the folder as ``last.pt``.
"""

import io
import json
import pickle
import random
import resource
import struct
import sys
import warnings
import zipfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastckpt._core.inspect.tree import read_tree, stored_bytes
from fastckpt._core.resume.load import LOAD_ERRORS, load_copy
from fastckpt.errors import BadCheckpoint
from tests.fuzz.mutations import Mutation, mutated, mutations

MEMORY = 16 << 30
"""Address space of the process in bytes: who asks for more is told that there is none."""


def outcome(data: bytes, folder: Path) -> str:
    """Load an image, and read what came; "loaded", or the error that refused it. Commands describe it or refuse it."""
    path = folder / "last.pt"
    path.write_bytes(data)
    with suppress(BadCheckpoint):
        tree = read_tree(io.BytesIO(data), path.name)
        assert stored_bytes(tree) >= 0
        assert all(isinstance(text, str) for entry in tree for text in (entry.name, entry.type, repr(entry.value)))
    try:
        read(load_copy(path, 1, weights_only=True))
    except LOAD_ERRORS as error:
        return type(error).__name__
    return "loaded"


def read(state: Any) -> None:
    """Touch all memory that a state claims to have."""
    parts = [state]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
        elif isinstance(part, torch.Tensor) and part.layout is torch.strided and part.device.type == "cpu":
            part.clone() if part.numel() < 1 << 20 else part.reshape(-1)[:10].clone()


def members(image: bytes) -> dict[str, bytes]:
    """What the archive holds, without a look at the checksums: images have none."""
    found = {}
    for info in zipfile.ZipFile(io.BytesIO(image)).infolist():
        name, extra = struct.unpack_from("<HH", image, info.header_offset + 26)
        start = info.header_offset + 30 + name + extra
        found[info.filename] = image[start : start + info.file_size]
    return found


def with_pickle(parts: dict[str, bytes], text: bytes) -> bytes:
    """An archive of these parts, but with another pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in parts.items():
            archive.writestr(name, text if name.endswith("data.pkl") else data)
    return out.getvalue()


def number(value: Any) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def tensor(numel: int = 100, size: Any = (100,), stride: Any = (1,), offset: int = 0) -> bytes:
    """A pickle of one tensor, whose storage has 400 bytes in truth."""
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpu" + number(numel) + b"tQ"
    numbers = number(offset) + number(size) + number(stride)
    return b"\x80\2ctorch._utils\n_rebuild_tensor_v2\n(" + storage + numbers + b"\x89ccollections\nOrderedDict\n)RtR."


def call(module: str, name: str, *arguments: Any) -> bytes:
    return f"\x80\2c{module}\n{name}\n(".encode("latin1") + b"".join(map(number, arguments)) + b"tR."


def crafted(mark: Path) -> dict[str, bytes]:
    """Pickles that somebody wrote on purpose. Those that run code make the file ``mark``."""
    return {
        "good": tensor(),
        "storage of 2**60 bytes": tensor(numel=2**58),
        "storage of 2**72 bytes": tensor(numel=2**70),
        "storage of -4 bytes": tensor(numel=-1),
        "storage of a text": tensor(numel="x"),  # type: ignore[arg-type]
        "tensor twice its storage": tensor(size=(200,)),
        "tensor of 4 MB": tensor(size=(10**6,)),
        "tensor of 8 GiB": tensor(size=(2**31,)),
        "tensor of 4 TiB": tensor(size=(2**40,)),
        "tensor of 2**64 bytes": tensor(size=(2**62,)),
        "tensor of 2**66 numbers": tensor(size=(2**33, 2**33), stride=(2**33, 1)),
        "strides beyond it": tensor(size=(2,), stride=(2**40,)),
        "strides before it": tensor(stride=(-1,)),
        "offset beyond it": tensor(size=(1,), offset=2**40),
        "offset before it": tensor(size=(1,), offset=-10),
        "negative size": tensor(size=(-5,)),
        "long text": b"\x80\2\x8d" + struct.pack("<Q", 2**60) + b"x.",
        "long number": b"\x80\2\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
        "memo of 4 billion": b"\x80\2}r\xff\xff\xff\xff.",
        "endless bytearray": b"\x80\5\x96" + struct.pack("<Q", 2**62) + b".",
        "storage without an id": b"\x80\2ctorch\nFloatStorage\nQ.",
        "tensor of numbers": b"\x80\2ctorch._utils\n_rebuild_tensor_v2\n(K\1K\2K\3tR.",
        "deep": b"\x80\2" + b"]" * 100_000 + b"a" * 99_999 + b".",
        "system": call("posix", "system", f"touch {mark}"),
        "exec": call("builtins", "exec", f"open({str(mark)!r}, 'w')"),
        "getattr": call("builtins", "getattr", "", "join"),
        "load": call("torch.serialization", "load", str(mark)),
        "hub": call("torch.hub", "load", str(mark)),
    }


def damaged_alike(good: bytes, folder: Path, examples: int) -> Counter[str]:
    """Outcomes of an image that is damaged in so many ways, and of as many with one bit flipped."""
    parts = members(good)
    text = next(data for name, data in parts.items() if name.endswith("data.pkl"))
    found: Counter[str] = Counter()

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(mutations(), st.booleans() | st.just(True))
    def fuzz(changes: list[Mutation], in_pickle: bool) -> None:
        damaged = with_pickle(parts, mutated(text, changes)) if in_pickle else mutated(good, changes)
        found[outcome(damaged, folder)] += 1

    fuzz()
    single = random.Random(7)
    for _ in range(examples):  # what hypothesis seldom does: one bit, anywhere
        i = single.randrange(len(good))
        flipped = good[:i] + bytes([good[i] ^ 1 << single.randrange(8)]) + good[i + 1 :]
        found[outcome(flipped, folder)] += 1
    return found


def main() -> None:
    folder, examples = Path(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    found = [damaged_alike(Path(good).read_bytes(), folder, examples) for good in sys.argv[3:]]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mark = folder / "mark"
    small = io.BytesIO()
    torch.save({"w": torch.zeros(100)}, small)
    answers = {
        name: outcome(with_pickle(members(small.getvalue()), text), folder) for name, text in crafted(mark).items()
    }
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    print(json.dumps({"found": found, "crafted": answers, "grown": grown, "mark": mark.exists()}))


if __name__ == "__main__":
    main()
