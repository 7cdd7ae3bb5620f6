"""Reads the sources as griffe sees them, without importing anything: the frameworks need not be installed."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[1]


@cache
def module(name: str) -> griffe.Module:
    """A module of ours."""
    place = ROOT.joinpath(*name.split("."))
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return griffe.visit(name, path, path.read_text(), docstring_parser="google")


def find(path: str) -> griffe.Object:
    """The object that a dotted name of ours leads to, wherever it is imported from."""
    name, _, member = path.rpartition(".")
    if not is_module(name):
        return find(name).members[member]  # type: ignore[return-value]
    if is_module(path):
        return module(path)
    found = module(name).members[member]
    return find(found.target_path) if isinstance(found, griffe.Alias) else found


def is_module(name: str) -> bool:
    """Return whether a dotted name is that of a module or package of ours."""
    place = ROOT.joinpath(*name.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def bases(cls: griffe.Class) -> Iterator[griffe.Class]:
    """The classes of ours from which one inherits, the nearest first."""
    for base in cls.bases:
        path = base if isinstance(base, str) else base.canonical_path
        if path.startswith("fastckpt."):
            found = find(path)
            assert isinstance(found, griffe.Class)
            yield found
            yield from bases(found)


def public_members(cls: griffe.Class) -> dict[str, griffe.Object]:
    """Methods, properties and attributes without an underscore that have a docstring, also inherited ones of ours."""
    found: dict[str, griffe.Object] = {}
    for each in (cls, *bases(cls)):
        for name, member in each.members.items():
            if not name.startswith("_") and member.has_docstring and not isinstance(member, griffe.Alias):
                found.setdefault(name, member)
    return found


def initializer(cls: griffe.Class) -> griffe.Function | None:
    """The ``__init__`` of a class, or of the nearest base of ours."""
    for each in (cls, *bases(cls)):
        if isinstance(made := each.members.get("__init__"), griffe.Function):
            return made
    return None


def exported(name: str) -> list[str]:
    """The public names of a module: ``__all__``, or all that it defines and documents."""
    here = module(name)
    if here.exports is not None:
        return [each if isinstance(each, str) else each.name for each in here.exports]
    own = (each for each in here.members.values() if not isinstance(each, griffe.Alias))
    return [each.name for each in own if not each.name.startswith("_") and each.has_docstring]


def linked_pages(text: str) -> str:
    """The text with links to the pages of docs/ that it names; each is called as its file."""
    return re.sub(r"\bdocs/((?:\w+/)*(\w+)\.md)", lambda page: f"[{page[2].replace('_', ' ')}](../{page[1]})", text)
