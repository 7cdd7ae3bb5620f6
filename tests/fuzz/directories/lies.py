"""Lies about a directory: in the place of an entry, code in pickles, and what made earlier versions reach outside."""

import io
import json
import os
import pickle
import shutil
import socket
import stat
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import FileEntry, Manifest, _digest
from fastckpt._core.io.direct import digest_file
from fastckpt._core.storage.share import Share, name_of
from tests.fuzz.directories.saved import state_of


class Lie(NamedTuple):
    """One change of a directory.

    Attributes:
        name: Says what is lied about, and how.
        entry: Its path in the directory.
        tell: Does it.
    """

    name: str
    entry: str
    tell: Callable[[Path], None]


# --- what is opened there blocks, never ends, or is not what has a name outside


def replaced(directory: Path, entry: str, put: Callable[[Path, Path], None]) -> None:
    """Have something else in the place of an entry, which is kept beside the directory's home, and may not be there."""
    path = directory / entry
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path):
        path.rename(directory.parent.parent / "replaced")
    put(path, directory.parent)


def _socket(path: Path, _: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's name is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def _loop(path: Path, _: Path) -> None:
    other = path.with_name(f"{path.name}.other")
    path.symlink_to(other.name)
    other.symlink_to(path.name)


def _filled(path: Path, _: Path) -> None:
    (path / "inner").mkdir(parents=True)
    (path / "file").write_text("not asked for")


def _sparse(path: Path, _: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def _device(path: Path, _: Path) -> None:
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "an endless link": _loop,
    "a link to itself": lambda path, _: path.symlink_to(path.name),
    "a link to /dev/zero": lambda path, _: path.symlink_to("/dev/zero"),
    "a hard link to a file outside": lambda path, home: path.hardlink_to(home / "thesis.tex"),
    "a pipe": lambda path, _: os.mkfifo(path),
    "a socket": _socket,
    "a device": _device,
    "a directory with files": _filled,
    "a sparse file of 1 TB": _sparse,
}
"""What an entry may be instead."""
WHY, REMAINS = f".fastckpt/quarantine-checkpoint-9-{0:012}/why.txt", f".fastckpt/deleted-{9:012}/remains"
WAITING = {
    "load": {
        ".fastckpt/identity": ("a pipe", "a link to /dev/zero"),
        ".fastckpt/history-2": ("a pipe",),
        "checkpoint-3/manifest.json": ("a pipe",),
        f".fastckpt/parts-1-9-{0:012}/part-0.json": ("a pipe",),
        "checkpoint-3/rank_0.pt": ("a pipe",),
        "checkpoint-3": ("an endless link",),
    },
    "look": {
        ".fastckpt/history-1": ("a pipe", "a link to /dev/zero"),
        WHY: ("a pipe", "a sparse file of 1 TB"),
        "latest_checkpointed_iteration.txt": ("a pipe",),
        ".fastckpt/events": ("a socket",),
        "checkpoint-2/model.pt": () if os.getuid() else ("a device",),
        ".fastckpt": ("a link to itself",),
    },
    "job": {
        ".fastckpt/writers": ("a pipe", "a hard link to a file outside"),
        ".fastckpt/checkpoint-1-9/draft": ("a pipe",),
        ".fastckpt/publisher": ("a socket",),
    },
    "tidy": {
        REMAINS: ("a pipe", "a link to /dev/zero"),
        f".fastckpt/tmp-{9:012}/draft": ("a pipe",),
        ".fastckpt/writers": ("a directory with files",),
    },
}
"""By action: what is in the place of which entry."""


def of_entries(action: str) -> list[Lie]:
    """Those of `WAITING`."""
    return [
        Lie(f"{entry} is {kind}", entry, partial(replaced, entry=entry, put=KINDS[kind]))
        for entry, kinds in WAITING[action].items()
        for kind in kinds
    ]


# --- what is unpickled there calls a function


class Canary:
    """Makes a file in its user's home when it is unpickled."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self._home}/harm",)


RUNNING = {
    "shard": {
        "checkpoint-3/.metadata": ("saved", "plain"), "checkpoint-3/__0_0.distcp": ("saved",),
        "checkpoint-3/rank_0.pt": ("plain",),
    },
    "left": {"checkpoint-3/model.pt": ("saved", "plain")},
}  # fmt: skip
"""By the kind of directory: which entry is code, and how."""


def of_pickles(kind: str) -> list[Lie]:
    """Code in the place of each of `RUNNING`, signed."""
    return [
        Lie(f"{entry} runs code, {how}", entry, partial(_run_code, entry=entry, how=how))
        for entry, hows in RUNNING[kind].items()
        for how in hows
    ]


def _run_code(directory: Path, entry: str, how: str) -> None:
    path, canary = directory / entry, Canary(directory.parent)
    with io.BytesIO() as file:
        if how == "saved":
            torch.save({**state_of(3), "harm": canary}, file)
        else:
            pickle.dump({"harm": canary, "state_dict_metadata": {}}, file)
        path.unlink()
        path.write_bytes(file.getvalue())
    manifest = path.parent / "manifest.json"
    if manifest.is_file():
        body = json.loads(manifest.read_text())
        for each in body["files"]:
            if each["name"] == path.name:
                content = path.read_bytes()
                each.update(size=len(content), digest=xxhash.xxh3_128_hexdigest(content))
        body.pop("digest")
        manifest.write_text(json.dumps({**body, "digest": _digest(body)}))


# --- several entries, which reach outside

HARM = b"echo harm\n"
Tell = Callable[[Path], None]


def checkpoint(place: Path, step: int, target: str = "", model: bytes | None = None) -> None:
    """A checkpoint as one who knows all formats writes it; by default with the files of a real one."""
    real = next(above / "checkpoint-3" for above in place.parents if (above / "checkpoint-3").is_dir())
    place.mkdir(parents=True)
    for name in ("model.pt", "rank_0.pt"):
        shutil.copy2(real / name, place / name)
    if model is not None:
        (place / "model.pt").write_bytes(model)
    files = tuple(_entry(place / name) for name in ("model.pt", "rank_0.pt"))
    details = {"ranks": {"0": ["model.pt", "rank_0.pt"]}, "num_threads": 1}
    manifest = Manifest(SaveId(1, step), None, files, 1, time.time(), details, target)
    (place / "manifest.json").write_text(manifest.to_json())


def _entry(path: Path) -> FileEntry:
    return FileEntry(path.name, path.stat().st_size, digest_file(path))


def _apart(directory: Path, kind: str, remains: str) -> None:
    record = directory / f".fastckpt/{kind}-{9:012}"
    record.mkdir(parents=True, exist_ok=True)
    (record / "manifest.json").write_text("{}")
    (record / "remains").write_text(remains)


def _parts(directory: Path) -> None:
    share = Share(0, 1, "ab" * 4, f"{directory.parent}/.bashrc")
    place = directory / f".fastckpt/parts-1-9-{share.key}"
    checkpoint(place / "files", 9, model=HARM)
    whole = Manifest.from_json((place / "files/manifest.json").read_text())
    (place / "files/manifest.json").unlink()
    (place / name_of(0)).write_text(share.mark(whole).to_json())


def _taken_for(directory: Path, place: str, step: int) -> None:
    """Have a checkpoint name a file outside that is like its own, by size and time."""
    shutil.rmtree(directory / place, ignore_errors=True)
    outside, target = (directory.parent / "thesis.tex").stat(), f"{directory.parent}/thesis.tex"
    checkpoint(directory / place, step, target=target, model=bytes(outside.st_size))
    os.utime(directory / place / "model.pt", ns=(outside.st_atime_ns, outside.st_mtime_ns))


def _links(directory: Path, target: str, *names: str) -> None:
    """Have entries lead to what is in the home."""
    for name in names:
        path = directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.symlink_to(directory.parent / target)


def _torn_mark(directory: Path) -> None:
    (directory / ".fastckpt/identity").unlink()
    (directory / ".fastckpt/identity").hardlink_to(directory.parent / ".bashrc")


PLACES = [f".fastckpt/{name}-{9:012}" for name in ("tmp", "dropped", "deleted", "retired", "parts-1-1")]
HISTORIES = [f".fastckpt/history-{number}" for number in range(1, 6)]
RETIRED, BEGUN = f".fastckpt/retired-{9:012}", f".fastckpt/deleted-{9:012}"
REACHING: dict[str, tuple[Tell, tuple[str, ...]]] = {
    "remains are the parent": (partial(_apart, kind="dropped", remains=".."), ("job",)),
    "remains of a deletion are the parent": (partial(_apart, kind="deleted", remains=".."), ("tidy",)),
    "remains go up from the private directory": (partial(_apart, kind="dropped", remains=".fastckpt/.."), ("job",)),
    "parts are to be published outside": (_parts, ("load", "tidy")),
    "a deletion that was begun names a file outside": (partial(_taken_for, place=BEGUN, step=3), ("job",)),
    "an older checkpoint names a file outside": (partial(_taken_for, place="checkpoint-2", step=2), ("prune", "job")),
    "a retired checkpoint names a directory outside": (
        lambda directory: checkpoint(directory / RETIRED, 3, target="project/"), ("job",)
    ),
    "places are links to a directory outside": (lambda it: _links(it, "project", *PLACES), ("job",)),
    "a checkpoint is a link to a directory outside": (lambda it: _links(it, "project", "checkpoint-7"), ("job",)),
    "the private directory is a link to another": (lambda it: _links(it, "project", ".fastckpt"), ("job", "tidy")),
    "the tracker is a link to a file outside": (
        lambda it: _links(it, ".bashrc", "latest_checkpointed_iteration.txt"), ("job",)
    ),
    "a lock is a dangling link": (lambda it: _links(it, "new", ".fastckpt/writers"), ("job",)),
    "another lock is a dangling link": (lambda it: _links(it, "new", ".fastckpt/publisher"), ("job",)),
    "the mark is a link to a file outside": (lambda it: _links(it, ".bashrc", ".fastckpt/identity"), ("job",)),
    "records of histories are links to a file outside": (lambda it: _links(it, ".bashrc", *HISTORIES), ("job",)),
    "the folder of events is a link to a directory outside": (
        lambda it: _links(it, "project", ".fastckpt/events"), ("job",)
    ),
    "a torn mark is a file outside by a hard link": (_torn_mark, ("job",)),
}  # fmt: skip
"""What tells them, and the actions that meet them."""
