"""Readers under atheris, which searches for inputs that reach new code."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.memory.slots import SlotBegin, SlotDone
from tests.fuzz import test_manifests, test_messages, test_safetensors
from tests.fuzz.mutations import PIECES

ROOT = Path(__file__).parents[2]
FIELDS = [f'"{name}":'.encode() for kind in test_messages.KINDS for name in test_messages.channel._HINTS[kind]]
WORDS = [*PIECES, b"../", *test_safetensors.FIELDS, *FIELDS, b'{"keep":"best","n":1}']


def seeds(reader: str, folder: Path) -> list[bytes]:
    """What the search begins with."""
    if reader == "message":
        return [message for good in test_messages.GOOD if (message := test_messages.channel.encode(good))]
    if reader == "manifest":
        return [good.to_json().encode() for good in test_manifests.GOOD]
    if reader == "safetensors":
        return test_safetensors.GOOD
    slot = folder / "good"
    slot.mkdir()
    slots.begin(slot, SlotBegin(SaveId(1, 7), frozenset({0})))
    slots.commit(slot, 0, SlotDone(SaveId(1, 7), {"model.pt": 5}, {"metrics": {"loss": 0.5}}))
    return [b"\n".join(json.dumps(json.loads((slot / name).read_text())).encode() for name in (".begin", ".done-0"))]


def quoted(piece: bytes) -> str:
    """As libFuzzer's dictionaries have it."""
    return "".join(f"\\x{byte:02x}" for byte in piece)


def guided(reader: str, folder: Path, runs: int) -> int:
    """How many inputs were tried; fails if one made the reader fail."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for i, seed in enumerate(seeds(reader, folder)):
        (corpus / f"seed-{i}").write_bytes(seed)
    words = folder / "words"
    words.write_text("".join(f'"{quoted(piece)}"\n' for piece in WORDS))
    options = [f"-runs={runs}", "-max_len=4096", "-len_control=0", f"-dict={words}", f"-artifact_prefix={folder}/"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/fuzz/targets.py"), reader, str(corpus), *options],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    count = re.search(r"Done (\d+) runs", done.stderr)
    assert count, done.stderr[-5000:]
    print(f"{reader}: {done.stderr.splitlines()[-1]}, {len(list(corpus.iterdir()))} inputs that reach unlike code")
    return int(count[1])


@pytest.mark.campaign
@pytest.mark.parametrize("reader", ["message", "manifest", "records", "safetensors"])
def test_readers_survive_inputs_that_atheris_searches_for(tmp_path: Path, reader: str):
    """FASTCKPT_FUZZ inputs (default 40,000), ten times as many where no file is written."""
    runs = int(os.environ.get("FASTCKPT_FUZZ", "40000")) * (1 if reader == "records" else 10)
    assert guided(reader, tmp_path, runs) >= runs
