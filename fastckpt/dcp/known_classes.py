"""Unpickles the plans and the metadata of torch.distributed.checkpoint, which name a handful of classes."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import PurePosixPath, PureWindowsPath
from typing import IO, Any

import torch
from torch.distributed.checkpoint import metadata, planner

from fastckpt._core.torch_private.sharding import PICKLED_ENUMS, PICKLED_PROPERTIES, StorageInfo, layout_of

_RECORDS = (
    *PICKLED_PROPERTIES,
    StorageInfo,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorStorageMetadata,
    planner.SavePlan,
    planner.TensorWriteData,
    planner.WriteItem,
)
"""Classes of plain attributes: an object is made without its constructor, and then given the pickle's attributes."""
_ENUMS: tuple[type[Enum], ...] = (*PICKLED_ENUMS, planner.WriteItemType)
_VALUES = torch.dtype, torch.layout, torch.memory_format


class _Refused(pickle.UnpicklingError):
    """A pickle names, or would change, a forbidden object."""


class _Sealed(type):
    """The type of stand-ins for classes and functions that a pickle names: they can be called, and not be changed.

    A pickle may set attributes of all objects that it names. On the class itself this would affect all its users.
    """

    def __setattr__(cls, name: str, value: object) -> None:
        raise _Refused(f"would change {cls.__name__}")


def _stand_in(name: str, new: Callable[..., Any]) -> type:
    return _Sealed(name, (), {"__slots__": (), "__new__": new})


def _record(kind: type) -> type:
    # Without arguments: no constructor is called.
    return _stand_in(kind.__name__, lambda _: object.__new__(kind))


def _member(kind: type[Enum]) -> type:
    # Not a call: an enum that does not know a value looks at all it has, and shows the value in its error.
    by_value = {member.value: member for member in kind}
    return _stand_in(kind.__name__, lambda _, value: by_value[value])


def _call(function: Callable[..., Any]) -> type:
    return _stand_in(function.__name__, lambda _, *arguments: function(*arguments))


_STAND_INS = {
    **{(kind.__module__, kind.__name__): _record(kind) for kind in _RECORDS},
    **{(kind.__module__, kind.__name__): _member(kind) for kind in _ENUMS},
    (layout_of.__module__, layout_of.__name__): _call(layout_of),
    ("torch", "Size"): _call(torch.Size),
}
_BY_STAND_IN = {_STAND_INS[kind.__module__, kind.__name__]: kind for kind in _ENUMS}
# Some releases of Python 3.11 pickle members of enums by their names.
_STAND_INS["builtins", "getattr"] = _call(lambda kind, name: _BY_STAND_IN[kind][name])
# As StorageMeta may have one. The module depends on the release of Python.
for _kind in (PurePosixPath, PureWindowsPath):
    for _name in (_kind.__name__, _kind.__name__.removeprefix("Pure")):
        _STAND_INS["pathlib", _name] = _STAND_INS["pathlib._local", _name] = _call(_kind)


class _Unpickler(pickle.Unpickler):
    """The one in C: torch.load(weights_only=True) takes ten times as long for a plan of thousands of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        # Not getattr: torch imports some modules when they are asked for.
        value = vars(torch).get(name) if module == "torch" else None
        found = value if isinstance(value, _VALUES) else _STAND_INS.get((module, name))
        if found is None:
            raise _Refused(f"has {module}.{name}")
        return found


def unpickled(file: IO[bytes], name: str, remedy: str = "") -> Any:
    """Unpickle a file that may name only the classes of a plan or of metadata; no other code is run.

    Args:
        file: Open for reading.
        name: Its name in errors.
        remedy: A user's remedy for one that names something else.

    Raises:
        UnpicklingError: It names something else, or is damaged.
    """
    try:
        with _unchanged():
            return _Unpickler(file).load()
    except _Refused as error:
        raise pickle.UnpicklingError(f"{name} {error}{remedy}") from error
    except (MemoryError, OSError):
        raise  # it proves nothing about the pickle
    except Exception as error:  # a damaged pickle may raise anything
        raise pickle.UnpicklingError(f"{name} is damaged: {type(error).__name__}: {error}") from error


@contextmanager
def _unchanged() -> Iterator[None]:
    """Restore attributes of enum members that a pickle has set, and refuse it: each is one object for all."""
    members = [member for kind in _ENUMS for member in kind]
    before = [dict(vars(member)) for member in members]
    try:
        yield
    finally:
        if changed := [
            (member, kept) for member, kept in zip(members, before, strict=True) if not _is_same(vars(member), kept)
        ]:
            for member, kept in changed:
                vars(member).clear()
                vars(member).update(kept)
            raise _Refused(f"would change {type(changed[0][0]).__name__}")


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)
