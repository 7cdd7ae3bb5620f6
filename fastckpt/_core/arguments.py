"""Checks of the arguments of public functions: each error names the value, the allowed ones and the remedy."""

import enum
import functools
import inspect
import numbers
import operator
import os
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from fastckpt.errors import AgentLost, ArgumentError, ConfigError, FastckptError, ProtocolError, SaverError

NOTE = "fastckpt: "
"""The beginning of notes that fastckpt adds to exceptions of users' own code."""
LONGEST = 80
"""Characters of a value that a message shows."""
MOST = 10
"""Names that a message lists."""
_HERE = f"{Path(__file__).parents[1]}{os.sep}"
_DEFECTS = (AgentLost, ProtocolError, SaverError)
"""Errors that are no mistake of the caller: their tracebacks show where fastckpt raised them."""
_TOO_MANY = re.compile(r"takes (?:from \d+ to )?(\d+) positional arguments? but (\d+) ")
_F = TypeVar("_F", bound=Callable[..., Any])


def shown(value: object) -> str:
    """A value as a message shows it: itself if it is short and plain, else its class."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, enum.Enum):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        text = repr(value)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def meant(name: object, names: Iterable[str]) -> str:
    """The question whether one of ``names`` was meant, to be added to a message; empty if none is alike."""
    near = get_close_matches(str(name), list(names), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def listed(names: Iterable[object]) -> str:
    """Alternatives, joined for a sentence."""
    *others, last = (repr(name) for name in names)
    return f"{', '.join(others)} or {last}" if others else last


def abbreviated(names: Sequence[str]) -> str:
    """The first names, for a message, and how many more there are."""
    return ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")


def choice(name: str, value: object, names: Collection[str]) -> str:
    """One of several words; raises ConfigError."""
    if isinstance(value, str) and value in names:
        return value
    raise ConfigError(f"{name} is {shown(value)}; give {listed(names)}{meant(value, names)}")


def member(kind: type[enum.Enum], name: str, value: object) -> ConfigError:
    """The error of a value that is no member of an enumeration."""
    near = next((f"; did you mean {each}?" for each in kind if str(value).lower() == each.name.lower()), "")
    return ConfigError(f"{name} is {shown(value)}; give {' or '.join(str(each) for each in kind)}{near}")


def directory(value: object, name: str = "checkpoint_dir") -> str:
    """A directory or URL as text; raises ArgumentError for any other value."""
    if isinstance(value, str | os.PathLike) and (text := os.fspath(value)) and isinstance(text, str):
        return _possible(name, text)
    raise ArgumentError(
        f"{name} is {shown(value)}; give a directory or a URL, such as 'checkpoints' or s3://bucket/run"
    )


def path(name: str, value: object) -> str:
    """A path or URL as text, which may be empty; raises ArgumentError."""
    if isinstance(value, str | os.PathLike) and isinstance(text := os.fspath(value), str):
        return _possible(name, text)
    remedy = "leave it out, or name a directory"
    if isinstance(value, enum.Enum):
        remedy = f"for how far to save, give {_snake(type(value).__name__)}={value}"
    elif isinstance(value, int):
        remedy = f"for a step give its directory, <checkpoint_dir>/checkpoint-{int(value)}"
    raise ArgumentError(f"{name} is {shown(value)}; it is a path or a URL: {remedy}")


def instance(name: str, value: object, kind: type, allowed: str, remedy: str) -> None:
    """Raise ArgumentError unless a value is of a class."""
    if not isinstance(value, kind):
        raise ArgumentError(f"{name} is {shown(value)}; it is to be {allowed}: {remedy}")


def whole_step(value: object, call: str = "it comes first: save_checkpoint(step, state_dict)") -> int:
    """A step, of any integral type, as an int; raises ArgumentError, which shows the right call."""
    try:
        return operator.index(cast(Any, value))
    except TypeError:
        is_number = isinstance(value, str | numbers.Number)
        remedy = "give int(step)" if is_number else call
    raise ArgumentError(f"step is {shown(value)}; it is a whole number, from 0 on: {remedy}")


def count(name: str, value: object, call: str) -> int:
    """A count, at least 1; raises ConfigError, which shows the right call."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ConfigError(f"{name} is {shown(value)}; give a whole number, 1 or more: {call}")


def seconds(name: str, value: object) -> float:
    """A time to wait, in seconds; raises ArgumentError."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return value
    raise ArgumentError(f"{name} is {shown(value)}; give seconds, 0 or more, such as {name}=1800")


def mapping(name: str, value: object, allowed: str) -> None:
    """Raise ArgumentError unless a value is a mapping."""
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{name} is {shown(value)}; give {allowed}")


def saving(step: object, state: object, rank_state: object, metrics: object, *, required: bool = False) -> None:
    """Check the arguments of a save; raises ArgumentError. None stands for an optional one that was left out."""
    whole_step(step)
    if state is not None or required:
        mapping("state_dict", state, "a dict, such as {'model': model.state_dict()}")
    if rank_state is not None:
        mapping("rank_state", rank_state, "a dict, such as {'losses': losses}")
    if metrics is not None:
        mapping("metrics", metrics, "a dict of numbers by name, such as {'loss': 0.5}")


def public(function: _F) -> _F:
    """Decorate a public function or method, so that its errors are about its caller's mistakes.

    An unknown or missing argument raises an ArgumentError that names the known ones. The traceback of an error of ours
    ends in the function: frames inside it are removed, also from causes, but for those of other libraries. Errors that
    point to a defect of fastckpt keep all.
    """
    names = _names(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if names is not None and not kwargs.keys() <= names.keys():
            raise ArgumentError(_unknown(function, next(name for name in kwargs if name not in names), names))
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if _came_up_here(error):
                raise ArgumentError(_lacking(function, error)) from None
            shorten(error)
            raise
        except Exception as error:
            shorten(error)
            raise

    return cast(_F, call)


def shorten(error: Exception) -> None:
    """Remove frames of ours from a traceback that begins in a wrapper of ours, except that of the public function."""
    noted = any(note.startswith(NOTE) for note in getattr(error, "__notes__", ()))
    if isinstance(error, _DEFECTS) or not (isinstance(error, FastckptError) or noted):
        return
    trace = error.__traceback__.tb_next if error.__traceback__ else None
    if trace is not None:
        below = None if isinstance(error, FastckptError) else _without_ours(trace.tb_next)
        error.__traceback__ = types.TracebackType(below, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
    _shorten_causes(error)


def _shorten_causes(error: BaseException) -> None:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None:
        return
    cause.__traceback__ = _without_ours(cause.__traceback__)
    if cause.__traceback__ is None:  # raised in our code alone: the message is enough
        error.__cause__, error.__suppress_context__ = None, True
    else:
        _shorten_causes(cause)


def _without_ours(trace: types.TracebackType | None) -> types.TracebackType | None:
    frames = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_HERE):
            frames.append(trace)
        trace = trace.tb_next
    kept: types.TracebackType | None = None
    for each in reversed(frames):
        kept = types.TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def _possible(name: str, text: str) -> str:
    """A path, if it is a possible one; raises ArgumentError."""
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ArgumentError(f"{name} is {shown(text)}; no file can have null bytes or what is not UTF-8: rename it")
    return text


def _came_up_here(error: TypeError) -> bool:
    """Return whether the call itself raised it: the function was not entered."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def _names(function: Callable[..., Any]) -> dict[str, None] | None:
    """The names of a function's arguments, those of its TypedDict included; None if it takes any."""
    names: dict[str, None] = {}
    for parameter in [*inspect.signature(function).parameters.values()]:
        if parameter.kind is parameter.VAR_KEYWORD:
            (options,) = get_args(parameter.annotation) or (None,)
            if not hasattr(options, "__annotations__"):
                return None
            names |= dict.fromkeys(options.__annotations__)
        elif parameter.name != "self" and parameter.kind is not parameter.VAR_POSITIONAL:
            names[parameter.name] = None
    return names


def _unknown(function: Callable[..., Any], name: str, names: Iterable[str]) -> str:
    return f"{_called(function)} has no argument {name!r}; there are {', '.join(names)}{meant(name, names)}"


def _lacking(function: Callable[..., Any], error: TypeError) -> str:
    names = _names(function) or {}
    if found := _TOO_MANY.search(str(error)):
        ours = "self" in inspect.signature(function).parameters
        most, given = (int(number) - ours for number in found.groups())
        taken = f"takes {', '.join([*names][:most]) or 'nothing'} by position, but {given} were given"
        return f"{_called(function)} {taken}: give the others by name, of {', '.join([*names][most:])}"
    missing = [name for name in names if f"'{name}'" in str(error)]
    remedy = f": give {', '.join(f'{name}=' for name in missing)}" if missing else ""
    return f"{_called(function)} {str(error).partition('() ')[2]}; there are {', '.join(names)}{remedy}"


def _called(function: Callable[..., Any]) -> str:
    return f"{function.__qualname__.removesuffix('.__init__')}()"


def _snake(name: str) -> str:
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in name).lstrip("_")
