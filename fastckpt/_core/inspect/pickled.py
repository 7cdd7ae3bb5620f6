"""Reads the pickle of a torch.save file without running any code that it names: tensors become descriptions."""

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from reprlib import recursive_repr
from typing import Any

from fastckpt.errors import BadCheckpoint

_TYPED = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "QUInt8": "quint8",
    "QInt8": "qint8",
    "QInt32": "qint32",
    "QUInt4x2": "quint4x2",
    "QUInt2x4": "quint2x4",
}
"""The types of elements by the names of torch's storage classes."""
_SIZES = {"bool": 1, "bfloat16": 2, "complex32": 4, "complex64": 8, "complex128": 16, "quint4x2": 1, "quint2x4": 1}


@dataclass(frozen=True)
class Storage:
    """The bytes that tensors are views of.

    Attributes:
        key: Key of the storage in the file.
        dtype: Type of its elements; "" if it has none of its own.
        count: Elements, or bytes if it has no type.
        device: Device from which it was saved, such as "cuda:0".
    """

    key: str
    dtype: str
    count: int
    device: str

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * (element_size(self.dtype) if self.dtype else 1)


@dataclass(frozen=True)
class Tensor:
    """A tensor, as its pickle describes it.

    Attributes:
        dtype: Type of its elements, such as "float32".
        shape: Elements in each dimension.
        stride: Elements between neighbours in each dimension.
        offset: Elements before its first one in the storage.
        storage: Its bytes; None if it has none (a meta tensor).
        views: Views by which its elements differ from the stored bytes: "conj", "neg".
        quantizer: Quantizer, as text; "" if they are not.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: Storage | None
    views: frozenset[str] = frozenset()
    quantizer: str = ""

    @property
    def count(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes of its elements."""
        return self.count * element_size(self.dtype)


@dataclass(eq=False, repr=False)
class Object:
    """The stand-in for an object that an unknown class or function would have made.

    Attributes:
        name: The class or function.
        parts: Arguments of the call, and values appended to it.
        entries: Values put into it under keys.
        state: State that was set afterwards; None for none.
    """

    name: str
    parts: list[Any] = field(default_factory=list)
    entries: dict[Any, Any] = field(default_factory=dict)
    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value

    def append(self, part: Any) -> None:
        """Add a value that the pickle appends to it as to a list."""
        self.parts.append(part)

    @recursive_repr()
    def __repr__(self) -> str:
        parts = [*map(repr, self.parts), *(f"{key!r}: {value!r}" for key, value in self.entries.items())]
        state = [] if self.state is None else [f"state={self.state!r}"]
        return f"{self.name}({', '.join(parts + state)})"


def element_size(dtype: str) -> int:
    """Bytes of one element; those of less than a byte take one."""
    if dtype in _SIZES:
        return _SIZES[dtype]
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def describe(data: bytes | bytearray, name: str) -> Any:
    """The state that a pickle of torch.save holds: containers and constants as they are, all else described.

    Raises BadCheckpoint, with the name of the file, if it cannot be understood.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle may raise anything
        raise BadCheckpoint(f"the pickle in {name} is damaged: {type(error).__name__}: {error}") from error


class _Unpickler(pickle._Unpickler):
    """Imports nothing: names in a pickle are one of the functions below, or a stand-in that makes an `Object`.

    It is the one in Python, at half the speed of the one in C, where ten bytes can claim all memory (LONG_BINPUT).
    """

    def find_class(self, module: str, name: str) -> Any:
        # Protocol 2 has the names of Python 2.
        return _KNOWN.get(f"{module.replace('__builtin__', 'builtins')}.{name}") or _stand_in(f"{module}.{name}")

    def persistent_load(self, identity: Any) -> Storage:
        kind, storage_type, key, device, count = identity
        if kind != "storage" or not isinstance(key, str) or not _is_count(count):
            raise pickle.UnpicklingError(f"{str(identity)[:100]} is no storage")
        dtype = _TYPED.get(_name_of(storage_type).removesuffix("Storage"), "")
        return Storage(key, dtype, count, str(device))


class _StandIn(type):
    """The type of classes that stand for a pickle's names: it needs a real class where it makes an object."""

    qualified: str

    def __call__(cls, *arguments: Any, **named: Any) -> Object:
        return Object(cls.qualified, [*arguments, *([named] if named else [])])

    def __repr__(cls) -> str:
        return cls.qualified


def _stand_in(name: str) -> _StandIn:
    def make(cls: _StandIn, *arguments: Any, **named: Any) -> Object:
        return cls(*arguments, **named)

    return _StandIn(name, (), {"qualified": name, "__new__": make})


def _name_of(value: Any) -> str:
    """The last part of a stand-in's name, such as "float32" of ``torch.float32``."""
    if not isinstance(value, _StandIn):
        raise pickle.UnpicklingError(f"{str(value)[:100]} stands where a type must")
    return value.qualified.rpartition(".")[2]


def name_of(value: Any) -> str | None:
    """The name that a stand-in in a described state stands for, such as "torch.float32"; None for another value."""
    return value.qualified if isinstance(value, _StandIn) else None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, dtype: str, views: Mapping[str, Any] | None = None
) -> Tensor:
    good = isinstance(storage, Storage) and all(map(_is_count, (offset, *shape, *stride)))
    if not good or len(shape) != len(stride):
        raise pickle.UnpicklingError(f"a tensor of shape {shape} and strides {stride} at {offset} cannot be")
    return Tensor(
        dtype, tuple(shape), tuple(stride), offset, storage, frozenset(k for k, v in (views or {}).items() if v)
    )


def _rebuild(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> Tensor:
    # then: requires_grad, backward hooks, views
    return _tensor(storage, offset, shape, stride, storage.dtype, rest[2] if len(rest) > 2 else None)


def _rebuild_v3(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> Tensor:
    # then: requires_grad, backward hooks, dtype, views
    return _tensor(storage, offset, shape, stride, _name_of(rest[2]), rest[3] if len(rest) > 3 else None)


def _rebuild_quantized(storage: Any, offset: Any, shape: Any, stride: Any, quantizer: Any, *_: Any) -> Tensor:
    text = ", ".join(name_of(part) or str(part) for part in quantizer)
    return replace(_tensor(storage, offset, shape, stride, storage.dtype), quantizer=text)


def _rebuild_meta(dtype: Any, shape: Any, stride: Any, _: Any) -> Tensor:
    return Tensor(_name_of(dtype), tuple(shape), tuple(stride), 0, None)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _rebuild_from_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    made = function(*arguments)
    return made if isinstance(made, Tensor) else Object(name_of(kind) or "object", [made], state=state)


def _bytes(text: str, encoding: str) -> bytes:
    return text.encode(encoding)


def _set(parts: Any = ()) -> frozenset[Any]:
    return frozenset(tuple(parts))


_KNOWN: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _rebuild,
    "torch._utils._rebuild_tensor_v2": _rebuild,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_qtensor": _rebuild_quantized,
    "torch._utils._rebuild_meta_tensor_no_storage": _rebuild_meta,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.Size": tuple,
    "collections.OrderedDict": OrderedDict,
    "_codecs.encode": _bytes,
    "builtins.set": _set,
    "builtins.frozenset": _set,
    "builtins.complex": complex,
}
