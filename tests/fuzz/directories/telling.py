"""The lies that tell most: how a directory made earlier versions reach outside, wait for ever or run code."""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import FileEntry, Manifest
from fastckpt._core.io.direct import digest_file
from fastckpt._core.storage.share import Share, name_of
from tests.fuzz.directories.lies import write_text

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


TOGETHER = (
    partial(_apart, kind="dropped", remains=".."), a_draft_of_an_earlier_version_is_due_outside,
    a_deletion_that_was_begun_names_a_file_outside, an_older_checkpoint_names_a_file_outside,
    partial(_link, links={"checkpoint-7": "project", ".fastckpt/events": "project"}),
    partial(_link, links={"latest_checkpointed_iteration.txt": ".bashrc"}),
)  # fmt: skip
"""Lies beside which a job goes on."""
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
RUNNING = {"shard": ("checkpoint-3/.metadata runs code, saved", "checkpoint-3/.metadata runs code, plain",
                     "checkpoint-3/__0_0.distcp runs code, saved", "checkpoint-3/rank_0.pt runs code, plain"),
           "left": ("checkpoint-3/model.pt runs code, saved", "checkpoint-3/model.pt runs code, plain")}  # fmt: skip
"""Names of lies, by the kind of directory: what is unpickled there calls a function."""
