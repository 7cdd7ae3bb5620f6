"""Log of a training program under faults, for the tests that watch it: its number, events, digests of its state.

Programs without fastckpt use it as well: this file does not import it.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch


def parser_of_all() -> argparse.ArgumentParser:
    """Of what each training is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint-dir", required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--memory", type=int, default=2, help="save to memory every so many steps")
    parser.add_argument("--disk", type=int, default=10, help="and to storage")
    return parser


class Log:
    """Appends a line of JSON for all that happens to ``<out>/log.<rank>``; who opens it tells who this rank is."""

    def __init__(self, out: Path, rank: int) -> None:
        draft = out / f"draft.{rank}"
        draft.write_text(str(os.getpid()))
        draft.rename(out / f"pid.{rank}")  # who sees the name finds the number
        self._file = os.open(out / f"log.{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def __call__(self, **fields: Any) -> None:
        os.write(self._file, json.dumps(fields).encode() + b"\n")


def digest(value: Any, into: Any = None) -> str:
    """Of all tensors' types, shapes and bytes, and of whatever else there is in containers."""
    into = into or hashlib.sha256()
    if isinstance(value, torch.Tensor):
        data = value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        into.update(repr((value.dtype, value.shape)).encode() + data)
    elif isinstance(value, dict | list | tuple):
        for part in sorted(value.items(), key=repr) if isinstance(value, dict) else value:
            digest(part, into)
    else:
        into.update(repr(value).encode())
    return into.hexdigest()
