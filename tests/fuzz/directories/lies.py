"""Lies about a directory: something else in the place of each entry, and those that tell most."""

import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import FileEntry, Manifest
from fastckpt._core.io.direct import digest_file
from fastckpt._core.storage.share import Share, name_of


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


ABSENT = (
    *(f".fastckpt/{name}" for name in (
        "writers", "publisher", "history-2", "events", "checkpoint-1-9/draft", "tmp-000000000009/draft",
        "tmp-000000000009",
        "parts-1-9-000000000000/part-0.json", "quarantine-3-1-000000000009/why.txt", "retired-000000000009",
        "dropped-000000000009", "dropped-000000000009/remains", "deleted-000000000009", "deleted-000000000009/remains",
    )),
    "checkpoint-9", "checkpoint-0004", "model.pt", "other-1",
)  # fmt: skip
"""Names that need not be there, and mean something."""


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


def _text(path: Path, _: Path, *, text: bytes, count: int) -> None:
    with path.open("wb") as file:
        for _ in range(count):
            file.write(text)


def _device(path: Path, _: Path) -> None:
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "a link to a file": lambda path, home: path.symlink_to(home / "thesis.tex"),
    "a link to a file, by a relative path": lambda path, home: path.symlink_to(
        os.path.relpath(home / ".bashrc", path.parent)
    ),
    "a link to a directory outside": lambda path, home: path.symlink_to(home / "project"),
    "a dangling link": lambda path, home: path.symlink_to(home / "new"),
    "a link to the home": lambda path, home: path.symlink_to(home),
    "an endless link": _loop,
    "a link to itself": lambda path, _: path.symlink_to(path.name),
    "a link to /dev/zero": lambda path, _: path.symlink_to("/dev/zero"),
    "a hard link to a file outside": lambda path, home: path.hardlink_to(home / "thesis.tex"),
    "a pipe": lambda path, _: os.mkfifo(path),
    "a socket": _socket,
    "a device": _device,
    "an empty directory": lambda path, _: path.mkdir(),
    "a directory with files": _filled,
    "an empty file": lambda path, _: path.touch(),
    "a sparse file of 1 TB": _sparse,
    "a huge text": partial(_text, text=b"x" * (1 << 20), count=80),
    "a deep text": partial(_text, text=b"[" * 1000, count=1000),
    "nothing": lambda path, _: None,
}
"""What an entry may be instead."""
if os.getuid():
    del KINDS["a device"]


def of_entries(directory: Path) -> Iterator[Lie]:
    """All lies in the place of what is there, or might be."""
    there = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
    for entry in dict.fromkeys([*there, *ABSENT]):
        for kind, put in KINDS.items():
            yield Lie(f"{entry} is {kind}", entry, partial(replaced, entry=entry, put=put))


def write_text(directory: Path, entry: str, text: str) -> None:
    (directory / entry).parent.mkdir(parents=True, exist_ok=True)
    (directory / entry).write_text(text)


# --- how a directory made earlier versions reach outside, or wait for ever

HARM = b"echo harm\n"
Tell = Callable[[Path], None]
REACHING: dict[str, tuple[str, Tell]] = {}
"""Lies that are of several entries: the action, and what tells them, by name."""


def reaching(*actions: str) -> Callable[[Tell], Tell]:
    def add(tell: Tell) -> Tell:
        for action in actions:
            REACHING[f"{tell.__name__}, {action}"] = action, tell
        return tell

    return add


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
    record = f".fastckpt/{kind}-{9:012}"
    write_text(directory, f"{record}/manifest.json", "{}")
    write_text(directory, f"{record}/remains", remains)


for action, kind, remains in (("job", "dropped", ".."), ("tidy", "deleted", ".."), ("job", "dropped", ".fastckpt/..")):
    REACHING[f"{kind} remains are {remains}, {action}"] = action, partial(_apart, kind=kind, remains=remains)


@reaching("job")
def a_draft_of_an_earlier_version_is_due_outside(directory: Path) -> None:
    draft = directory / ".fastckpt/.fastckpt-harm"
    draft.write_bytes(HARM)
    checkpoint(directory / ".fastckpt/checkpoint-1-4", 4, target=f"{directory.parent}/.bashrc")
    (directory / ".fastckpt/checkpoint-1-4/draft").write_text(str(draft))


@reaching("load", "tidy")
def parts_are_to_be_published_outside(directory: Path) -> None:
    share = Share(0, 1, "ab" * 4, f"{directory.parent}/.bashrc")
    place = directory / f".fastckpt/parts-1-9-{share.key}"
    checkpoint(place / "files", 9, model=HARM)
    whole = Manifest.from_json((place / "files/manifest.json").read_text())
    (place / "files/manifest.json").unlink()
    (place / name_of(0)).write_text(share.mark(whole).to_json())


def _taken_for(directory: Path, place: str, step: int) -> None:
    """Have a checkpoint name a file outside that is like its own, by size and time."""
    outside = (directory.parent / "thesis.tex").stat()
    checkpoint(directory / place, step, f"{directory.parent}/thesis.tex", bytes(outside.st_size))
    os.utime(directory / place / "model.pt", ns=(outside.st_atime_ns, outside.st_mtime_ns))


@reaching("job")
def a_deletion_that_was_begun_names_a_file_outside(directory: Path) -> None:
    _taken_for(directory, f".fastckpt/deleted-{9:012}", 3)


@reaching("prune", "job")
def an_older_checkpoint_names_a_file_outside(directory: Path) -> None:
    shutil.rmtree(directory / "checkpoint-2")
    _taken_for(directory, "checkpoint-2", 2)


@reaching("job")
def a_retired_checkpoint_names_a_directory_outside(directory: Path) -> None:
    checkpoint(directory / f".fastckpt/retired-{9:012}", 3, target="project/")


PLACES = ("tmp", "dropped", "deleted", "retired", "parts-1-1")
LINKS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "places are links to a directory outside": (("job",), {f".fastckpt/{name}-{9:012}": "project" for name in PLACES}),
    "a checkpoint is a link to a directory outside": (("job",), {"checkpoint-7": "project"}),
    "the private directory is a link to another": (("job", "tidy"), {".fastckpt": "project"}),
    "the tracker is a link to a file outside": (("job",), {"latest_checkpointed_iteration.txt": ".bashrc"}),
    "locks are dangling links": (("job",), {f".fastckpt/{name}": f"new-{name}" for name in ("writers", "publisher")}),
    "the mark is a link to a file outside": (("job",), {".fastckpt/identity": ".bashrc"}),
    "records of histories are links to a file outside": (
        ("job",), {f".fastckpt/history-{number}": ".bashrc" for number in range(1, 6)}
    ),
    "the folder of events is a link to a directory outside": (("job",), {".fastckpt/events": "project"}),
}  # fmt: skip
"""The actions, and what links to which entry of the home, by name."""


def _link(directory: Path, links: Mapping[str, str]) -> None:
    for name, target in links.items():
        path = directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.symlink_to(directory.parent / target)


for name, (actions, links) in LINKS.items():
    REACHING |= {f"{name}, {action}": (action, partial(_link, links=links)) for action in actions}


@reaching("job")
def a_torn_mark_is_a_file_outside_by_a_hard_link(directory: Path) -> None:
    (directory / ".fastckpt/identity").unlink()
    (directory / ".fastckpt/identity").hardlink_to(directory.parent / ".bashrc")


WAITING = {
    "load": (
        ".fastckpt/identity is a pipe", ".fastckpt/history-2 is a pipe", "checkpoint-3/manifest.json is a pipe",
        f".fastckpt/parts-1-9-{0:012}/part-0.json is a pipe", "checkpoint-3/rank_0.pt is a pipe",
        ".fastckpt/identity is a link to /dev/zero", "checkpoint-3 is an endless link",
    ),
    "look": (
        ".fastckpt/history-1 is a pipe", f".fastckpt/quarantine-checkpoint-9-{0:012}/why.txt is a pipe",
        "latest_checkpointed_iteration.txt is a pipe", ".fastckpt/history-1 is a link to /dev/zero",
        ".fastckpt/events is a socket", "checkpoint-2/model.pt is a device", ".fastckpt is a link to itself",
        f".fastckpt/quarantine-checkpoint-9-{0:012}/why.txt is a sparse file of 1 TB",
    ),
    "job": (
        ".fastckpt/writers is a pipe", ".fastckpt/checkpoint-1-9/draft is a pipe", ".fastckpt/publisher is a socket",
        ".fastckpt/writers is a hard link to a file outside",
    ),
    "tidy": (
        f".fastckpt/deleted-{9:012}/remains is a pipe", f".fastckpt/tmp-{9:012}/draft is a pipe",
        f".fastckpt/deleted-{9:012}/remains is a link to /dev/zero", ".fastckpt/writers is a directory with files",
    ),
}  # fmt: skip
"""Names of lies, by action: what is opened there blocks, never ends, or is not what has a name outside."""
