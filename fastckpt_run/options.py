"""The launcher's command line: our own options by click, everything else by torchrun's own parser."""

import inspect
import re
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import Field, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

import click

from fastckpt._core.config import Settings, variable

PREFIX = "--fast"
SWITCHES_OFF = {f"{PREFIX}-no-preload": f"{PREFIX}-preload=off"}
"""Options without a value that stand for one with a text."""
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


@cache
def command() -> click.Command:
    """Our own options, one for each field of Settings, as a click command without a body."""
    return click.Command("fastckpt-run", params=[_option(field) for field in fields(Settings)], add_help_option=False)


def parse(parser: ArgumentParser, argv: Sequence[str]) -> tuple[Settings, Namespace]:
    """Read a command line; ``parser`` is torchrun's.

    Returns our settings (options before ``FASTCKPT_*`` variables before defaults) and the namespace that
    torchrun would have had for the same command line without our options. Raises click.UsageError or
    ConfigError for our options; for torchrun's, ``parser`` exits as it does in torchrun.
    """
    ours, theirs = split(parser, argv)
    ours = [SWITCHES_OFF.get(argument, argument) for argument in ours]
    given = command().make_context("fastckpt-run", ours).params
    settings = replace(Settings.from_environment(), **{n: v for n, v in given.items() if v is not None})
    return settings, parser.parse_args(theirs)


def split(parser: ArgumentParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part a command line into our options and the rest, which ``parser`` shall read.

    Ours stand before the script, at any place where torchrun could have an option. What a torchrun flag
    takes as its value, and all that follows the script or ``--``, is not looked at.
    """
    ours: list[str] = []
    theirs: list[str] = []
    rest = list(argv)
    while rest:
        if rest[0].startswith(PREFIX):
            mine, width = ours, _width_of_ours(rest)
        else:
            mine, width = theirs, _width(parser, rest[0])
        if not width:
            break
        mine += rest[:width]
        rest = rest[width:]
    return ours, theirs + rest


def _option(field: Field[Any]) -> click.Option:
    name = field.name.replace("_", "-")
    default: Any = field.default
    switch = isinstance(default, bool)
    flag = f"{PREFIX}-{name}/{PREFIX}-no-{name}" if switch else f"{PREFIX}-{name}"
    shown = ("no", "yes")[default] if switch else default or repr(default)
    text = f"{_explanations().get(field.name, '')} [env: {variable(field.name)}; default: {shown}]"
    kind = type(default)
    reads = _number(flag, kind) if kind in (int, float) else None if switch else kind
    return click.Option([field.name, flag], type=reads, default=None, help=text)


def _number(flag: str, kind: type[float]) -> Callable[[str], float]:
    """What reads an option's value, and answers what is none as it is answered in a variable."""

    def read(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            allowed = "a whole number" if kind is int else "a number"
            raise click.UsageError(f"{flag} is {text!r}; give {allowed}") from None

    read.__name__ = "integer" if kind is int else "float"  # as the help calls it
    return read


def _explanations() -> dict[str, str]:
    """What the docstring of Settings says of each field."""
    return dict(re.findall(r"^    (\w+): (.+)$", inspect.getdoc(Settings) or "", re.MULTILINE))


def _width_of_ours(rest: Sequence[str]) -> int:
    """How many arguments our option at the head of ``rest`` takes up, with itself."""
    if rest[0] in SWITCHES_OFF:
        return 1
    name, equals, _ = rest[0].partition("=")
    known = {flag: p for p in command().params for flag in (*p.opts, *p.secondary_opts)}
    if name not in known:
        begun = [flag for flag in known if flag.startswith(name)]
        alike = get_close_matches(name.removeprefix(PREFIX), [flag.removeprefix(PREFIX) for flag in known], 1)
        near = begun or [PREFIX + flag for flag in alike]
        question = f"; did you mean {near[0]}?" if len(near) == 1 else ""
        raise click.UsageError(
            f"no such option: {name}; names are given in full: {', '.join(begun or known)}{question}"
        )
    option = known[name]
    if equals or (isinstance(option, click.Option) and option.is_flag):
        return 1
    if len(rest) < 2 or rest[1].startswith("--"):
        raise click.UsageError(f"{name} needs a value")
    return 2


def _width(parser: ArgumentParser, arg: str) -> int:
    """How many arguments torchrun's flag ``arg`` takes up, with itself; 0 if ``arg`` is no flag."""
    table = parser._option_string_actions
    name, equals, _ = arg.partition("=")
    if not arg.startswith("-") or arg in ("-", "--"):
        return 0
    if name in table:
        return 1 if equals else 1 + _takes_value(table[name])
    if arg.startswith("--"):
        found = [action for flag, action in table.items() if flag.startswith(name)]
    else:
        found = [action] if (action := _last_of_cluster(table, arg)) else []
    if not found and (" " in arg or _NEGATIVE_NUMBER.fullmatch(arg)):
        return 0  # argparse takes these for positional arguments
    return 1 + (not equals and any(map(_takes_value, found)))


def _takes_value(action: Action) -> bool:
    return action.nargs != 0


def _last_of_cluster(table: dict[str, Action], arg: str) -> Action | None:
    """The action in ``-mr`` that looks for a value in the next argument; None if none does."""
    letters = arg[1:]
    while letters and (action := table.get(f"-{letters[0]}")):
        letters = letters[1:]
        if _takes_value(action):
            return None if letters else action
    return None
