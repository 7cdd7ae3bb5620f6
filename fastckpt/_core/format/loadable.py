"""Checks that a saved state will load with ``weights_only=True``, and names the part that will not."""

import io
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, cast

import torch

from fastckpt._core.arguments import NOTE
from fastckpt._core.error_codes import coded
from fastckpt._core.format.sink import Sink
from fastckpt._core.format.skeleton import Skeleton, sketch
from fastckpt._core.torch_private.tensors import archive_reader
from fastckpt.errors import NotLoadable

_GLOBAL = re.compile(rb"c([ -~]{1,300}\n[ -~]{1,300})\n")
"""Pickle's opcode GLOBAL, as protocol 2 writes it: with names in ASCII, as few bytes of numbers look."""

_WRAPPER = b"\n_rebuild_wrapper_subclass\n"
"""Bytes in the pickle of a tensor that wraps others, such as a DTensor."""


def check_own(state: Any, skeleton: Skeleton) -> None:
    """Raise NotLoadable, with the path of the first culprit, for tensors that wrap others: such as a rank's shards."""
    if _wraps(skeleton):
        path, culprit = innermost("state", state, lambda part: _wraps(sketch(part)[0]))
        raise NotLoadable(
            coded(
                f"{path} is a {type(culprit).__module__}.{type(culprit).__qualname__}, which wraps other tensors, and "
                "does not load from a file of torch.save that ranks share. Save a DTensor with fastckpt.fsdp."
                "FsdpShardCheckpointer, or as what its full_tensor() gives.",
                "FC-006",
            )
        )


def _wraps(skeleton: Skeleton) -> bool:
    return any(_WRAPPER in data for _, data in skeleton.segments)


def check_loadable(state: Any, skeleton: Skeleton) -> None:
    """Raise NotLoadable, with the path of the first culprit, if stock ``torch.load`` would refuse the file."""
    if _refusal(skeleton) is None:
        return
    path, culprit = innermost("state", state, _is_refused)
    own = "what its state_dict() gives, " if hasattr(culprit, "state_dict") else "it as "
    raise _not_loadable(path, f"{type(culprit).__module__}.{type(culprit).__qualname__}", own)


class LoadableArchives:
    """Checks archives of single values, each unless earlier ones named all of its globals."""

    def __init__(self) -> None:
        self._named: frozenset[bytes] = frozenset()

    def check(self, path: str, archive: bytes) -> None:
        """Raise NotLoadable, with the path of the value, if ``torch.load(weights_only=True)`` would refuse it."""
        try:
            named = frozenset(_GLOBAL.findall(archive_reader(io.BytesIO(archive)).get_record("data.pkl")))
            if named <= self._named:
                return
            torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:  # RuntimeError: a planner's own bytes, no archive
            raise _not_loadable(path, refused_class(error) or "value", "it as ") from error
        self._named |= named


def refused_class(error: Exception) -> str:
    """The class, or function, that ``torch.load(weights_only=True)`` has refused; empty if it refused another thing."""
    refused = re.search(r"(?:GLOBAL|Unsupported class) ([\w.]+)", str(error))
    return refused[1] if refused else ""


def _not_loadable(path: str, kind: str, own: str) -> NotLoadable:
    return NotLoadable(
        coded(
            f"{path} is a {kind}, which torch.load(weights_only=True) refuses. Save {own}plain Python values or "
            "tensors, allow it with torch.serialization.add_safe_globals, or pass weights_only=False to the "
            "checkpointer if you trust whoever can write to its directory.",
            "FC-006",
        )
    )


def globals_named(skeleton: Skeleton) -> frozenset[bytes]:
    """The classes and functions that the pickle names, and perhaps some texts that look alike."""
    return frozenset(_GLOBAL.findall(b"".join(data for _, data in skeleton.segments)))


def _refusal(skeleton: Skeleton) -> Exception | None:
    """The error of loading a file; on the meta device no tensor bytes are read."""
    sink = Sink()
    for offset, data in skeleton.segments:
        sink.seek(offset)
        sink.write(data)
    sink.seek(0)
    try:
        torch.load(cast(IO[bytes], sink), map_location="meta", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        return error
    return None


def add_path(error: Exception, state: Any) -> None:
    """Add a note with the key to an error of any kind that saving ``state`` has raised."""

    def raises(part: Any) -> bool:
        try:
            sketch(part)
        except type(error):
            return True
        return False

    path, culprit = innermost("state", state, raises)
    error.add_note(
        f"{NOTE}{path}, a {type(culprit).__module__}.{type(culprit).__qualname__}, cannot be saved; "
        "leave it out, or save plain values or tensors in its place"
    )


def _is_refused(part: Any) -> bool:
    return _refusal(sketch(part)[0]) is not None


def innermost(path: str, node: Any, is_bad: Callable[[Any], bool]) -> tuple[str, Any]:
    """The innermost part that is bad on its own, and its path."""
    above: set[int] = set()
    while True:
        above.add(id(node))
        parts = (part for part in _children(node) if id(part[1]) not in above)
        found = next(((step, part) for step, part in parts if is_bad(part)), None)
        if found is None:
            return path, node
        path, node = path + found[0], found[1]


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    if type(node) in (list, tuple):
        yield from ((f"[{i}]", child) for i, child in enumerate(node))
    elif isinstance(node, Mapping) and type(node).__module__ in ("builtins", "collections"):
        yield from ((f"[{key!r}]", child) for key, child in node.items())
