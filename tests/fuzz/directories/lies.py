"""Well-formed lies about a directory: of each field of each record, and in the place of each entry, one at a time."""

import io
import json
import math
import os
import pickle
import socket
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from fastckpt._core.format.ids import LARGEST
from fastckpt._core.format.manifest import _digest
from fastckpt.errors import BadCheckpoint
from tests.fuzz.directories.saved import state_of


class Lie(NamedTuple):
    """One change of a directory.

    Attributes:
        name: Says what is lied about, and how.
        entry: Its path in the directory.
        tell: Does it.
        forges: Whether another state may have been put under a step's name, by someone who can sign as we do.
    """

    name: str
    entry: str
    tell: Callable[[Path], None]
    forges: bool = False


# --- entries

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


# --- fields


def of_fields(directory: Path) -> Iterator[Lie]:
    """All lies in the records, which are valid again then, and in texts."""
    home = directory.parent
    for path in sorted(directory.rglob("*")):
        entry = str(path.relative_to(directory))
        if path.name == "manifest.json" or path.name.startswith("part-"):
            yield from _of_record(entry, json.loads(_plain(path)), home, _signed)
        elif path.name.startswith("history-"):
            yield from _of_record(entry, json.loads(path.read_text()), home, _record)
        elif path.suffix == ".jsonl":
            yield from _of_log(entry, path.read_text().splitlines(), home)
    texts = [f".fastckpt/{name}" for name in ("deleted-000000000000/remains", "dropped-000000000001/remains")]
    texts += [".fastckpt/identity", ".fastckpt/tmp-000000000000/draft", "latest_checkpointed_iteration.txt"]
    texts += [str(path.relative_to(directory)) for path in sorted(directory.glob(".fastckpt/quarantine-*/why.txt"))]
    for entry in texts:
        for text in [*texts_of(home), "checkpoint-3", "checkpoint-2", ".fastckpt", "f" * 32, "9" * 30]:
            yield Lie(f"{entry} says {text[:60]!r}", entry, partial(write_text, entry=entry, text=text))


def _plain(path: Path) -> str:
    return path.read_text().rstrip("}") + "}" if path.parent.name.startswith("quarantine") else path.read_text()


def write_text(directory: Path, entry: str, text: str) -> None:
    (directory / entry).parent.mkdir(parents=True, exist_ok=True)
    (directory / entry).write_text(text, "utf-8", "surrogatepass")


def _signed(body: Any) -> str:
    """A manifest with the digest of its text."""
    body.pop("digest", None)
    return json.dumps({**body, "digest": _digest(body)})


def _record(body: Any) -> str:
    """A record of a history in whole pages."""
    text = json.dumps(body)
    return text.ljust(-(-len(text) // 1024) * 1024 - 1) + "\n"


def _of_record(entry: str, body: Any, home: Path, written: Callable[[Any], str]) -> Iterator[Lie]:
    for place in places(body):
        for value in lies_about(_at(body, place), home):
            lying = json.loads(json.dumps(body))
            _put(lying, place, value)
            try:
                text = written(lying)
            except BadCheckpoint:  # it is no JSON: of NaN
                continue
            name = f"{entry}: {'.'.join(map(str, place))} is {_shown(value)}"
            yield Lie(name, entry, partial(write_text, entry=entry, text=text), forges=place[0] in ("id", "files"))


def _of_log(entry: str, lines: list[str], home: Path) -> Iterator[Lie]:
    """Lies in one event of each name."""
    seen = set[str]()
    for i, line in enumerate(lines):
        body = json.loads(line)
        if body["event"] in seen:
            continue
        seen.add(body["event"])
        for place in places(body):
            for value in lies_about(_at(body, place), home):
                lying = json.loads(line)
                _put(lying, place, value)
                text = "\n".join([*lines[:i], json.dumps(lying), *lines[i + 1 :], ""])
                name = f"{entry}: {body['event']}.{'.'.join(map(str, place))} is {_shown(value)}"
                yield Lie(name, entry, partial(write_text, entry=entry, text=text))


def _shown(value: Any) -> str:
    return repr(value) if len(repr(value)) < 60 else f"{repr(value)[:50]}..., {len(repr(value))} characters"


def places(body: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all values in a JSON value, such as ("files", 0, "name")."""
    items = body.items() if isinstance(body, dict) else enumerate(body[:2]) if isinstance(body, list) else ()
    for key, value in items:
        if key == "digest" and not above:
            continue  # it is made to fit
        yield (*above, key)
        yield from places(value, (*above, key))


def _at(body: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        body = body[key]
    return body


def _put(body: Any, place: tuple[Any, ...], value: Any) -> None:
    _at(body, place[:-1])[place[-1]] = value


def texts_of(home: Path) -> list[str]:
    """Paths and names that a text may say."""
    outside = [str(home / "thesis.tex"), f"{home}/project/", str(home / "new"), "/dev/zero", "/", str(home)]
    inside = ["model.pt", "rank_0.pt", "checkpoint-2/model.pt", "checkpoint-3/", ".fastckpt/identity", "manifest.json"]
    odd = ["", ".", "x" * 300, "x\ny", "\x1b[2J", "a\0b", "\ud800", "a//b"]
    return [*outside, "..", "../..", "../.bashrc", "checkpoint-3/../../.bashrc", ".fastckpt/..", *inside, *odd]


NUMBERS = [0, -1, 1, 2, 3, 99, LARGEST, 2**63, 2**64, 10**400, 0.5, 1e300, math.nan, math.inf, 4_000_000_000.0]


def lies_about(value: Any, home: Path) -> list[Any]:
    """Other values of its kind, and of other kinds."""
    others: list[Any] = [None, True, [], {}, "5", 7]
    match value:
        case bool() | None:
            found: list[Any] = [not value, [3, 1], {"history": 1, "step": 2}, "..", 1]
        case int() | float():
            found = NUMBERS
        case str():
            digits = ["0" * 32, "f" * 32] if len(value) == 32 else []
            found = [*texts_of(home), *digits]
        case list():
            found = [[], [*value, *value], value[::-1], value * 2000, [None]]
        case dict():
            found = [{}, {name: None for name in value}, {**value, "..": value}, {str(n): value for n in range(300)}]
        case _:
            found = []
    return [each for each in [*found, *others] if (each is not value and each != value) or each != each]


# --- code


class Canary:
    """Makes a file in its user's home when it is unpickled."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self._home}/harm",)


def of_pickles(directory: Path) -> Iterator[Lie]:
    """Code in the place of each pickle, signed."""
    for path in sorted(directory.rglob("*")):
        if path.suffix in (".pt", ".distcp") or path.name == ".metadata":
            entry = str(path.relative_to(directory))
            for how in ("saved", "plain"):
                yield Lie(f"{entry} runs code, {how}", entry, partial(_run_code, entry=entry, how=how))


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
        body = json.loads(_plain(manifest))
        for each in body["files"]:
            if each["name"] == path.name:
                content = path.read_bytes()
                each.update(size=len(content), digest=xxhash.xxh3_128_hexdigest(content))
        manifest.write_text(_signed(body))
