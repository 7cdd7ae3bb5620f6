"""Checkpoint directories of a script, as far as they are known before it runs: by arguments, source and memory."""

import ast
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from fastckpt._core.memory.census import ArenaEntry, ArenaState, census
from fastckpt._core.report.events import find, read
from fastckpt._core.report.report import report
from fastckpt._core.storage.local.layout import PRIVATE
from fastckpt._core.storage.store import as_path, is_url, normalised
from fastckpt.errors import ConfigError
from fastckpt_run.script_analysis import option_values
from fastckpt_run.script_analysis import read as read_script

_NAMED = re.compile(r"(?i)--?[\w-]*(checkpoint|ckpt)[\w-]*(dir|path|folder)?")
"""Options of scripts for a directory of checkpoints."""
_NOT_DIRECTORIES = re.compile(r"(?i).*(every|interval|freq|steps?|keep|mode|type|format|limit|mb)")
_ENDING = "Checkpointer"


def known_directories(command: list[str], shm_dir: str) -> list[tuple[str, str]]:
    """Each directory, and how it is known; there is none of a script that computes its directory.

    Args:
        command: The script, or -m and a module, and its arguments.
        shm_dir: The directory of arenas.
    """
    arenas = _arenas(shm_dir)
    script = command[1:2] if command[:1] == ["-m"] else command[:1]
    arguments = command[len(script) + (command[:1] == ["-m"]) :]
    found = dict[str, str]()
    sources = [*_in_arguments(arguments, arenas), *_in_source(command, arguments), *_in_memory(script, arenas)]
    for directory, how in sources:
        with suppress(ConfigError):  # a URL that names no place
            found.setdefault(normalised(directory), how)
    return list(found.items())


def _in_arguments(arguments: Sequence[str], arenas: Sequence[ArenaEntry]) -> Iterator[tuple[str, str]]:
    in_memory = {arena.directory for arena in arenas}
    for option, value in option_values(arguments):
        named = _NAMED.fullmatch(option) and not _NOT_DIRECTORIES.fullmatch(option)
        place = as_path(value)
        has_ours = not is_url(value) and (Path(place) / PRIVATE).is_dir()
        if value and (named or is_url(value) or has_ours or os.path.realpath(place) in in_memory):
            how = f"{option} of the script" if option else "an argument of the script"
            yield value, how


def _in_source(command: Sequence[str], arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Directories that are written in the script: of a checkpointer, or the default of an option that is not given."""
    script = read_script([*command])
    for node in ast.walk(script.tree) if script.tree is not None else ():
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        where = f"line {node.lineno} of the script"
        if called.endswith(_ENDING):
            named = {keyword.arg: keyword.value for keyword in node.keywords}
            directory = _text(named.get("checkpoint_dir") or next(iter(node.args), None))
            if directory:
                yield directory, f"{called} in {where}"
        elif called == "add_argument":
            yield from _default(node, arguments, where)


def _default(call: ast.Call, arguments: Sequence[str], where: str) -> Iterator[tuple[str, str]]:
    options = [text for argument in call.args if (text := _text(argument)).startswith("-")]
    default = _text(next((each.value for each in call.keywords if each.arg == "default"), None))
    given = any(argument.partition("=")[0] in options for argument in arguments)
    named = [each for each in options if _NAMED.fullmatch(each) and not _NOT_DIRECTORIES.fullmatch(each)]
    if named and default and not given:
        yield default, f"the default of {named[0]} in {where}"


def _in_memory(script: Sequence[str], arenas: Sequence[ArenaEntry]) -> Iterator[tuple[str, str]]:
    """Directories with memory on this host of jobs that ran a script of this name."""
    name = Path(script[0]).name if script else ""
    for arena in arenas:
        if arena.directory and not is_url(arena.directory) and name:
            with suppress(ConfigError, OSError):
                nodes = report([read(path) for path in find(arena.directory)]).nodes
                if any(placed.launch.script == name for launches in nodes.values() for placed in launches):
                    yield arena.directory, f"memory that a launch of {name} left on this host"


def _arenas(shm_dir: str) -> list[ArenaEntry]:
    try:
        return [entry for entry in census(Path(shm_dir)) if entry.state is not ArenaState.FOREIGN]
    except OSError:
        return []


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
