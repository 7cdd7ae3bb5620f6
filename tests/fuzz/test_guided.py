"""Readers under atheris, which searches for inputs that reach new code; run as ``test_guided READER FOLDER OPTION...``.

Whatever a reader does not refuse keeps the promises of the other tests here.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

if __name__ == "__main__":
    import atheris

    instrumented = atheris.instrument_imports(include=["fastckpt"])
else:
    instrumented = nullcontext()
with instrumented:
    from fastckpt._core.format.ids import SaveId
    from fastckpt._core.ipc import channel
    from fastckpt._core.ipc.messages import Hello
    from fastckpt._core.memory import slots
    from fastckpt._core.memory.slots import SlotBegin, SlotDone
    from fastckpt._core.policy.retention import from_json
    from fastckpt.errors import BadCheckpoint, ProtocolError
    from tests.fuzz import test_manifests, test_messages, test_safetensors
    from tests.fuzz.mutations import PIECES

ROOT = Path(__file__).parents[2]
FIELDS = [f'"{name}":'.encode() for kind in test_messages.KINDS for name in channel._HINTS[kind]]
WORDS = [*PIECES, b"../", *test_safetensors.FIELDS, *FIELDS, b'{"keep":"best","n":1}']


def message(data: bytes) -> None:
    """Understood can be said again; a policy in it is understood or refused."""
    found = test_messages.decoded(data)
    assert found is None or channel.decode(channel.encode(found)) == found
    if isinstance(found, Hello):
        with suppress(ProtocolError):
            from_json(found.policy)


def manifest(data: bytes) -> None:
    """The digest is always right."""
    with suppress(ValueError, RecursionError, AttributeError, BadCheckpoint):
        data = test_manifests.signed(json.loads(data)).encode()
    test_manifests.check(data)


def records(data: bytes) -> None:
    """A slot whose records are any bytes holds a checkpoint or none."""
    slot = Path("slot-0")
    slot.mkdir(exist_ok=True)
    begin, _, done = data.partition(b"\n")
    (slot / ".begin").write_bytes(begin)
    (slot / ".done-0").write_bytes(done)
    found = slots.read(slot)
    if found.committed:
        assert all(type(size) is int for size in found.files.values()) and isinstance(found.details, dict)


def good_records() -> list[bytes]:
    slot = Path("good")
    slot.mkdir()
    slots.begin(slot, SlotBegin(SaveId(1, 7), frozenset({0})))
    slots.commit(slot, 0, SlotDone(SaveId(1, 7), {"model.pt": 5}, {"metrics": {"loss": 0.5}}))
    return [b"\n".join(json.dumps(json.loads((slot / name).read_text())).encode() for name in (".begin", ".done-0"))]


READERS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "message": (message, lambda: [*filter(None, map(channel.encode, test_messages.GOOD))]),
    "manifest": (manifest, lambda: [good.to_json().encode() for good in test_manifests.GOOD]),
    "records": (records, good_records),
    "safetensors": (test_safetensors.check, lambda: test_safetensors.GOOD),
}
"""Readers, and what the search begins with."""


@pytest.mark.campaign
@pytest.mark.parametrize("reader", READERS)
def test_readers_survive_inputs_that_atheris_searches_for(tmp_path: Path, monkeypatch, reader: str):
    """FASTCKPT_FUZZ inputs (default 40,000), ten times as many where no file is written."""
    monkeypatch.chdir(tmp_path)
    runs = int(os.environ.get("FASTCKPT_FUZZ", "40000")) * (1 if reader == "records" else 10)
    Path("corpus").mkdir()
    for i, seed in enumerate(READERS[reader][1]()):
        Path(f"corpus/seed-{i}").write_bytes(seed)
    quoted = ("".join(f"\\x{byte:02x}" for byte in piece) for piece in WORDS)  # as libFuzzer's dictionaries have it
    Path("words").write_text("".join(f'"{piece}"\n' for piece in quoted))
    options = [f"-runs={runs}", "-max_len=4096", "-len_control=0", "-dict=words", f"-artifact_prefix={tmp_path}/"]
    program = [sys.executable, "-m", "tests.fuzz.test_guided", reader, "corpus", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    count = re.search(r"Done (\d+) runs", done.stderr)
    assert count and int(count[1]) >= runs, done.stderr[-5000:]
    print(f"{reader}: {done.stderr.splitlines()[-1]}, {len(os.listdir('corpus'))} inputs that reach unlike code")


if __name__ == "__main__":
    atheris.Setup([sys.argv[0], *sys.argv[2:]], READERS[sys.argv[1]][0])
    atheris.Fuzz()
