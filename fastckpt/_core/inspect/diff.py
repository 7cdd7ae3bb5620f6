"""Compares two states: their structure, and the values of each tensor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from fastckpt._core.inspect.inventory import InventoryFile
from fastckpt._core.inspect.pickled import Tensor
from fastckpt._core.inspect.tree import Group, Tree, TreeEntry
from fastckpt._core.inspect.values import StateFile
from fastckpt._core.inspect.work_progress import UNOBSERVED, WorkObserver, share_of
from fastckpt.errors import BadCheckpoint


@dataclass(frozen=True)
class Change:
    """A name whose value differs in type, shape or value between the states.

    Attributes:
        name: The name.
        what: "type", "shape" or "value".
        a: Value in the first state, as text.
        b: Value in the second state.
    """

    name: str
    what: str
    a: str
    b: str


@dataclass
class Distance:
    """The distance between the elements of two tensors of one shape. NaN equals NaN, and 0.0 equals -0.0.

    Attributes:
        count: Elements.
        differing: Elements that are not equal.
        nans: Elements among them that are NaN in one tensor only.
        max_abs: The largest absolute difference of the others: an exact int between integers; None if the type of the
            elements has no numbers that torch can subtract.
    """

    count: int = 0
    differing: int = 0
    nans: int = 0
    max_abs: int | float | None = 0

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Take in a block of elements of each."""
        self.count += a.numel()
        if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            return
        if _are_whole(a, b):
            self._add_whole(a, b)
            return
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        try:
            self._add_real(a.to(wide), b.to(wide))
        except (RuntimeError, NotImplementedError):
            self._add_bytes(a, b)

    def _add_real(self, a: torch.Tensor, b: torch.Tensor) -> None:
        nan_a, nan_b = a.isnan(), b.isnan()
        differing = (a != b) & ~(nan_a & nan_b)
        nans = nan_a ^ nan_b
        self.differing += int(differing.sum())
        self.nans += int(nans.sum())
        distances = (a - b).abs()[differing & ~nans]
        if distances.numel():
            # The distance of complex infinities may be no number.
            self._extend(distances.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item())

    def _add_whole(self, a: torch.Tensor, b: torch.Tensor) -> None:
        a, b = _ordered(a), _ordered(b)
        self.differing += int((a != b).sum())
        # Differences of 64 bits wrap around; as numbers without a sign they are right.
        wrapped = torch.maximum(a, b) - torch.minimum(a, b)
        negative = wrapped[wrapped < 0]
        self._extend(int(negative.max()) + 2**64 if negative.numel() else int(wrapped.max()))

    def _add_bytes(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.max_abs = None
        same = a.dtype == b.dtype
        rows = (a.view(torch.uint8) != b.view(torch.uint8)).view(a.numel(), -1).any(dim=1) if same else None
        self.differing += a.numel() if rows is None else int(rows.sum())

    def _extend(self, distance: float) -> None:
        if self.max_abs is not None:
            self.max_abs = max(self.max_abs, distance)


class BitDistance(Distance):
    """The same with each element that has other bits counted as differing: 0.0 is not -0.0 then."""

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Take in a block of elements of each."""
        before = self.differing
        super().add(a, b)
        if a.dtype == b.dtype and a.numel():
            other = a.view(torch.uint8) != b.view(torch.uint8)
            self.differing = before + int(other.view(a.numel(), -1).any(dim=1).sum())


@dataclass
class Difference:
    """The differences of two states.

    Attributes:
        only_a: Names that the first state alone has.
        only_b: Names that the second alone has.
        changes: Names that are of another type, shape or value.
        tensors: Tensors whose elements differ, by name.
        compared: Number of compared tensors.
    """

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    tensors: dict[str, Distance] = field(default_factory=dict)
    compared: int = 0

    def __bool__(self) -> bool:
        return bool(self.only_a or self.only_b or self.changes or self.tensors)


def diff_all(
    pairs: Mapping[str, tuple[InventoryFile, InventoryFile]], observer: WorkObserver = UNOBSERVED
) -> dict[str, Difference]:
    """Compare pairs of files, as `diff_files` does; the observer gets the bytes that both have."""
    sizes = {name: a.whole_size + b.whole_size for name, (a, b) in pairs.items()}
    observer.begin("compare", sum(sizes.values()))
    differences = {}
    for name, (a, b) in pairs.items():
        with share_of(observer, sizes[name]) as advance:
            differences[name] = diff_files(a, b, advance)
    return differences


def diff_files(
    a: InventoryFile,
    b: InventoryFile,
    on_read: Callable[[int], None] = lambda _: None,
    kind: type[Distance] = Distance,
) -> Difference:
    """Compare the states in two files, tensor by tensor; neither is ever in memory as a whole.

    Strides, shared storages and the device of a tensor do not count. ``on_read`` is called with each number of bytes;
    ``kind`` compares two tensors.

    Raises:
        BadCheckpoint: One of the files is damaged.
    """
    with StateFile(a, on_read) as left, StateFile(b, on_read) as right:
        in_a, in_b = _by_keys(left.tree), _by_keys(right.tree)
        difference = Difference(
            only_a=[entry.name for keys, entry in in_a.items() if keys not in in_b],
            only_b=[entry.name for keys, entry in in_b.items() if keys not in in_a],
        )
        for keys, entry in in_a.items():
            if keys in in_b:
                other = in_b[keys]
                difference.changes.extend(_changes(entry, other))
                if distance := _distance(left, right, entry, other, kind(), on_read):
                    difference.compared += 1
                    if distance.differing:
                        difference.tensors[entry.name] = distance
        return difference


def _by_keys(tree: Tree) -> Mapping[tuple[str, ...], TreeEntry]:
    """Entries by unambiguous keys: 1, True and "1" are three."""
    return {tuple(map(repr, entry.keys)): entry for entry in tree}


def _changes(a: TreeEntry, b: TreeEntry) -> list[Change]:
    if a.type != b.type:
        return [Change(a.name, "type", a.type, b.type), *_shape_change(a, b)]
    if isinstance(a.value, Group):
        return []
    if isinstance(a.value, Tensor) and isinstance(b.value, Tensor):
        kinds = [value.quantizer or ("no elements" if value.storage is None else "") for value in (a.value, b.value)]
        return _shape_change(a, b) or _value_change(a.name, *kinds)
    return _value_change(a.name, repr(a.value), repr(b.value))


def _value_change(name: str, a: str, b: str) -> list[Change]:
    return [Change(name, "value", a, b)] if a != b else []


def _shape_change(a: TreeEntry, b: TreeEntry) -> list[Change]:
    of_a, of_b = (getattr(entry.value, "shape", None) for entry in (a, b))
    if of_a is None or of_b is None or of_a == of_b:
        return []
    return [Change(a.name, "shape", str(list(of_a)), str(list(of_b)))]


def _distance(
    left: StateFile,
    right: StateFile,
    a: TreeEntry,
    b: TreeEntry,
    distance: Distance,
    on_read: Callable[[int], None],
) -> Distance | None:
    """The distance, with all elements; None where there is nothing to compare: no tensors, two shapes, no elements."""
    if not isinstance(a.value, Tensor) or not isinstance(b.value, Tensor) or a.value.shape != b.value.shape:
        return None
    if a.value.storage is None or b.value.storage is None:
        return None
    blocks_a, blocks_b = left.blocks(a.value), right.blocks(b.value)
    try:
        for block_a, block_b in zip(blocks_a, blocks_b, strict=True):
            distance.add(block_a, block_b)
            on_read(block_a.nbytes + block_b.nbytes)
    except ValueError as error:
        raise BadCheckpoint(f"{a.name} is stored in {left.path} unlike in {right.path}: {error}") from error
    return distance


def _are_whole(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether both hold integers that have one order."""
    real = [tensor.is_floating_point() or tensor.is_complex() for tensor in (a, b)]
    return not any(real) and (a.dtype == b.dtype or torch.uint64 not in (a.dtype, b.dtype))


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers as int64 in the same order and at the same distances."""
    if tensor.dtype == torch.uint64:
        return tensor.view(torch.int64) ^ torch.iinfo(torch.int64).min
    return tensor.to(torch.int64)
