"""Finds how the checkpoint directory of a script is set, by its source, and sets it: an argument or a variable."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastckpt.errors import ConfigError
from fastckpt_run.script_analysis import Script

_REMEDY = (
    "Make it an argument or a variable of the environment, and name that: --dir-argument --out, or --dir-variable NAME"
)
_DEPTH = 5
"""Assignments that are followed from the checkpointer to where the directory comes from."""


@dataclass(frozen=True)
class DirectorySetting:
    """Option or variable that sets the checkpoint directory.

    Attributes:
        argument: An option of the script, such as ``--out`` or, of hydra, ``out=``; a number for a positional one.
        variable: A variable of the environment; empty if it is an argument.
    """

    argument: str = ""
    variable: str = ""

    def arguments(self, given: Sequence[str], directory: str) -> list[str]:
        """The script's arguments with the directory in place of their own."""
        if not self.argument:
            return list(given)
        if self.argument.isdecimal():
            place = int(self.argument) - 1
            if place > len(given):
                raise ConfigError(
                    f"the script's directory is argument {place + 1}, and it was given {len(given)}: give all of its "
                    "arguments before it"
                )
            return [*given[:place], directory, *given[place + 1 :]]
        if self.argument.endswith("="):
            return [*(each for each in given if not each.startswith(self.argument)), self.argument + directory]
        kept, skip = list[str](), False
        for each in given:
            if not skip and each != self.argument and not each.startswith(f"{self.argument}="):
                kept.append(each)
            skip = not skip and each == self.argument
        return [*kept, self.argument, directory]

    def environment(self, directory: str) -> dict[str, str]:
        """Variables that set it."""
        return {self.variable: directory} if self.variable else {}

    def __str__(self) -> str:
        return f"the variable {self.variable}" if self.variable else f"the argument {self.argument}"


def find_setting(script: Script, name: str) -> DirectorySetting:
    """Find the setting of a script's directory, by the arguments of the checkpointers that its source makes.

    Raises:
        ConfigError: It cannot be set, or the source does not show how; with a remedy.
    """
    if script.tree is None:
        raise ConfigError(f"the source of {name} cannot be read, so how its checkpoint directory is set. {_REMEDY}")
    calls = [node for node in ast.walk(script.tree) if isinstance(node, ast.Call) and _is_checkpointer(node)]
    reader = _SourceReader(script.tree)
    hidden = list[str]()
    for call in calls:
        for place in _places(call):
            for source in reader.sources(place, _DEPTH):
                if isinstance(source, DirectorySetting):
                    return source
                hidden.append(source)
    if hidden:
        raise ConfigError(f"{name} cannot be run with a checkpoint directory of its own: {hidden[0]}. {_REMEDY}")
    what = "makes no checkpointer of fastckpt" if not calls else "gives its checkpointer a directory of unknown origin"
    raise ConfigError(f"{name} {what}, as far as its source shows, so how to set the directory. {_REMEDY}")


def _is_checkpointer(call: ast.Call) -> bool:
    name = ast.unparse(call.func).rpartition(".")[2]
    return name.endswith(("Checkpointer", "StorageWriter", "CheckpointIO")) or name in (
        "output_dir",
        "TrainingArguments",
    )


def _places(call: ast.Call) -> Iterator[ast.expr]:
    """Yield the arguments that may be the directory: keywords of such names first."""
    yield from (
        each.value for each in call.keywords if each.arg in ("checkpoint_dir", "output_dir", "directory", "path")
    )
    yield from call.args


class _SourceReader:
    """Follows an expression in a module to where its value comes from."""

    def __init__(self, tree: ast.Module) -> None:
        self._assigned: dict[str, ast.expr] = {}
        self._options: dict[str, str] = {}
        positional = 0
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._assigned.setdefault(name, value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self._assigned.setdefault(name, value)
                case ast.Call(func=ast.Attribute(attr="add_argument"), args=[*names]) if names:
                    positional += self._note_option(node, [_text(each) for each in names], positional)

    def _note_option(self, call: ast.Call, names: list[str], positional: int) -> int:
        """Note argparse's name for an option's value; 1 if it is a positional argument."""
        given = next((_text(each.value) for each in call.keywords if each.arg == "dest"), "")
        long = next((name for name in names if name.startswith("--")), names[0])
        self._options[given or long.lstrip("-").replace("-", "_")] = long if long[:1] == "-" else str(positional + 1)
        return int(long[:1] != "-")

    def sources(self, value: ast.expr, depth: int) -> Iterator[DirectorySetting | str]:
        """Yield the origins of a value, the surest first: a setting, or in words why it cannot be set."""
        constants = list[str]()
        for node in _parts(value):
            match node:
                case ast.Attribute(value=ast.Name(), attr=name) if name in self._options:
                    yield DirectorySetting(argument=self._options[name])
                case ast.Subscript(value=target, slice=ast.Constant(value=key)):
                    yield from _subscript(target, key)
                case ast.Call(
                    func=ast.Attribute(value=target, attr="get"), args=[ast.Constant(value=str(key)), *_]
                ) if _ends(target, "environ") and key:
                    yield DirectorySetting(variable=key)
                case ast.Call(func=ast.Attribute(attr="getenv") | ast.Name(id="getenv"), args=[key, *_]) if _text(key):
                    yield DirectorySetting(variable=_text(key))
                case ast.Name(id=name) if name in self._assigned and depth:
                    yield from self.sources(self._assigned[name], depth - 1)
                case ast.Constant(value=str(text)) if text:
                    constants.append(f"the directory is written in the source, as {text!r} in line {node.lineno}")
        yield from constants


def _parts(value: ast.expr) -> Iterator[ast.AST]:
    """An expression and its parts, the outer ones first, without conditions: they ask for no directory."""
    level: list[ast.AST] = [value]
    while level:
        yield from level
        level = [
            child
            for node in level
            for child in ast.iter_child_nodes(node)
            if not (isinstance(node, ast.IfExp) and child is node.test)
        ]


def _subscript(target: ast.expr, key: object) -> Iterator[DirectorySetting]:
    if _ends(target, "environ") and isinstance(key, str):
        yield DirectorySetting(variable=key)
    elif _ends(target, "argv") and isinstance(key, int) and key > 0:
        yield DirectorySetting(argument=str(key))


def _ends(node: ast.expr, name: str) -> bool:
    return ast.unparse(node).rpartition(".")[2] == name


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
