"""Checkpoints of other libraries in a directory: a job that passed over them would start afresh beside them."""

import os
import re
import zipfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from fastckpt._core.io.regular_file import open_regular

MOST = 1000
"""Number of names in a directory that are read at most."""
FLASH, DCP, TORCH = "Flash Checkpoint", "torch.distributed.checkpoint", "torch.save"
LIGHTNING, DEEPSPEED, MEGATRON = "Lightning", "DeepSpeed", "Megatron"
TRAINER, ACCELERATE = "transformers' Trainer", "accelerate"

_STEP = re.compile(r"(?:.*[-_=a-z])?[0-9]+", re.IGNORECASE)
"""Name of a directory of one step, by any library."""
_MARKS = {
    TRAINER: re.compile(r"trainer_state\.json"),
    DEEPSPEED: re.compile(r"(?:mp_rank_\d+|zero_pp_rank_\d+_mp_rank_\d+|layer_\d+.*)_(?:model|optim)_states\.pt"),
    MEGATRON: re.compile(r"mp_rank_\d+(?:_\d+)*"),
    DCP: re.compile(r"\.metadata"),
    ACCELERATE: re.compile(r"random_states_\d+\.pkl"),
    FLASH: re.compile(r"rank_\d+\.pt"),
}
"""A name that shows which library laid out a directory; the first that fits counts."""
_FILE = re.compile(r".*\.(?:pt|pth|ckpt|tar)", re.IGNORECASE)
_LEGACY = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""First bytes of files of torch.save before they were archives."""
_PLAIN_DATA = (b"ctorch._utils\n", b"]", b"(", b"ctorch\nSize")
"""First bytes of the pickle of a tensor, or of a list of tensors: data, and no state of a job."""
_BEGINNING = 1 << 20
"""Bytes of a pickle in which Lightning's mark is looked for."""


class ForeignFiles(NamedTuple):
    """A checkpoint of another library: its path, and the library, as far as its names and first bytes show."""

    path: Path
    writer: str


def foreign(directory: Path) -> list[ForeignFiles]:
    """Return checkpoints in a directory, and in its directories of steps; logs, configurations and data are none.

    Nothing is unpickled. Raises OSError if the directory cannot be read.
    """
    if not directory.is_dir():
        return []
    here = _names(directory)
    own = _writer_of(here)
    if own in (DCP, DEEPSPEED, ACCELERATE):
        return [ForeignFiles(directory, own)]
    return [*_files(directory, here), *_steps(directory, here)]


def _files(directory: Path, names: list[str]) -> Iterator[ForeignFiles]:
    for name in names:
        if _FILE.fullmatch(name) and (writer := _writer_of_file(directory / name)):
            yield ForeignFiles(directory / name, writer)


def _steps(directory: Path, names: list[str]) -> Iterator[ForeignFiles]:
    for place in (directory / name for name in names if _STEP.fullmatch(name)):
        within = _names(place) if place.is_dir() else []
        if writer := _writer_of(within):
            yield ForeignFiles(place, writer)
        else:
            yield from _files(place, within)


def _names(directory: Path) -> list[str]:
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in islice(entries, MOST))


def _writer_of(names: list[str]) -> str:
    return next((writer for writer, mark in _MARKS.items() if any(map(mark.fullmatch, names))), "")


def _writer_of_file(path: Path) -> str:
    """Return the library that wrote a checkpoint file; empty if it is none, or cannot be read."""
    try:
        with os.fdopen(open_regular(path, follow=True), "rb") as stored:
            if stored.read(len(_LEGACY)) == _LEGACY:
                return TORCH
            archive = zipfile.ZipFile(stored)
            names = archive.namelist()
            pickled = next((name for name in names if name.endswith("/data.pkl")), "")
            if not pickled or not any("/data/" in name for name in names):
                return ""
            with archive.open(pickled) as file:
                beginning = file.read(_BEGINNING)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        return ""
    if beginning[2:].startswith(_PLAIN_DATA):
        return ""
    return LIGHTNING if b"pytorch-lightning_version" in beginning else TORCH
