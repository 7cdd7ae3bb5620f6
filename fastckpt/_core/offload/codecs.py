"""Lossless forms of a tensor with many zeros: the least of dense, positions and bit vectors, by operations of torch.

Elements are compared as words of bits, so that -0.0, NaNs with a payload and denormal numbers come back as they were.
Each operation releases the GIL: threads encode and decode while the training thread goes on in Python.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROW = 128
"""Elements of a row. The column of an element in it fits one byte, and so does the number of nonzero ones."""
SAMPLE_RUNS, SAMPLE_RUN = 64, 1024
"""A sample is so many runs of so many elements, spread evenly: zeros of activations come in patches."""

TIMED = 1 << 20
"""Elements that are encoded to see how long that takes."""
PIECE = 1024 * ROW
"""Number of elements at a time on a CPU: the result of one operation is in the cache for the next. Twice as fast."""

DENSE, POSITIONS, BITS = "dense", "positions", "bits"

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Eight bytes of 0 or 1, as one word, times this have the eight bits in the highest byte. The k-th byte is moved to bit
# 56 + k by the one factor 2 ** (56 - 7 * k). No two of the other products meet, so that nothing is carried.
_GATHER = 0x0102040810204080


@dataclass(frozen=True)
class EncodedForm:
    """All but the bytes of an encoded tensor.

    Attributes:
        form: "dense", "positions" or "bits".
        dtype: The type of the tensor.
        shape: Its shape; decoded tensors are contiguous.
        stored: The type of the values that are stored; another one than ``dtype`` if precision was given up.
        parts: Type and number of elements of each part.
    """

    form: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: torch.dtype
    parts: tuple[tuple[torch.dtype, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(dtype.itemsize * count for dtype, count in self.parts)


@dataclass(frozen=True)
class Encoded:
    """An encoded tensor.

    Attributes:
        description: Data that `decode` needs besides the bytes.
        parts: Contiguous tensors of one dimension. That of a dense form shares the memory of a contiguous tensor.
    """

    description: EncodedForm
    parts: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return self.description.nbytes

    @property
    def form(self) -> str:
        """Return "dense", "positions" or "bits"."""
        return self.description.form


def encode(tensor: torch.Tensor, *, half: bool = False) -> Encoded:
    """Put a tensor into the form of the fewest bytes.

    Args:
        tensor: Any tensor with strides.
        half: Store 32-bit floats as 16-bit ones, unless a finite one would become infinite. Not lossless.
    """
    dense = _resolved(tensor).contiguous().reshape(-1)
    values = _halved(dense) if half and dense.dtype == torch.float32 else dense
    form, parts = _least(values)
    lengths = tuple((part.dtype, part.numel()) for part in parts)
    return Encoded(EncodedForm(form, tensor.dtype, tuple(tensor.shape), values.dtype, lengths), parts)


def decode(description: EncodedForm, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a contiguous tensor with the bits of the one that was encoded; a dense one shares its part's memory."""
    found = tuple((part.dtype, part.numel()) for part in parts)
    if found != description.parts:
        raise ValueError(f"parts of a {description.form} tensor are {found}; expected {description.parts}")
    count = torch.Size(description.shape).numel()
    if description.form == DENSE:
        values = parts[0]
    elif description.stored == torch.bool:
        values = _bools(parts, description.form, count)
    else:
        words = _from_bits(parts, count) if description.form == BITS else _from_positions(parts, count)
        values = words.view(description.stored)
    return values.to(description.dtype).reshape(description.shape)


def sample_ratio(tensor: torch.Tensor) -> float:
    """Estimate the bytes of the encoded form per byte of the tensor from a sample of it; 1.0 if nothing is gained."""
    values = _in_memory_order(_resolved(tensor))
    count = values.numel()
    if not count:
        return 1.0
    if count > SAMPLE_RUNS * SAMPLE_RUN:
        # Runs begin at multiples of this, the last one ends within the tensor.
        step = (count - SAMPLE_RUN) // (SAMPLE_RUNS - 1)
        values = values.as_strided((SAMPLE_RUNS, SAMPLE_RUN), (step, 1), values.storage_offset()).reshape(-1)
    if values.dtype != torch.bool and not _has_words(values):
        return 1.0
    nonzero = int(torch.count_nonzero(_words(values)))
    sizes = _sizes(values.numel(), nonzero, 0 if values.dtype == torch.bool else values.element_size())
    return min(1.0, *(size / (values.numel() * values.element_size()) for size in sizes.values()))


def codec_rates(tensor: torch.Tensor) -> tuple[float, float]:
    """Bytes of the tensor per second that a thread encodes, and decodes: a part of it is, on the processor of now."""
    part = _in_memory_order(_resolved(tensor))[:TIMED]
    start = time.perf_counter()
    encoded = encode(part)
    middle = time.perf_counter()
    # A device has decoded when an element has come to the host.
    decode(encoded.description, encoded.parts)[-1:].cpu()
    size, end = part.numel() * part.element_size(), time.perf_counter()
    return size / (middle - start), size / (end - middle)


def _least(values: torch.Tensor) -> tuple[str, tuple[torch.Tensor, ...]]:
    """The form of the fewest bytes, and its parts."""
    if not values.numel() or not _has_words(values):
        return DENSE, (values,)
    words = _words(values)
    of_value = values.element_size()
    if values.dtype == torch.bool:
        # A byte that is neither 0 nor 1, as views can make, would not come back.
        if int(words.max()) > 1:
            return DENSE, (values,)
        of_value = 0
    sizes = _sizes(words.numel(), int(torch.count_nonzero(words)), of_value)
    form = min(sizes, key=lambda each: sizes[each])
    if sizes[form] >= values.numel() * values.element_size():
        return DENSE, (values,)
    encoder = _bits if form == BITS else _positions
    pieces = [encoder(piece, with_values=bool(of_value)) for piece in _pieces(words)]
    return form, tuple(torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*pieces, strict=True))


def _sizes(count: int, nonzero: int, of_value: int) -> dict[str, int]:
    """Bytes of each form that is not dense."""
    rows = -(-count // ROW)
    return {BITS: rows * ROW // 8 + nonzero * of_value, POSITIONS: rows + nonzero * (1 + of_value)}


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    # A conjugate or a negative may be a view that other operations take into account: its memory has other bits.
    return tensor.detach().resolve_conj().resolve_neg()


def _has_words(values: torch.Tensor) -> bool:
    return values.element_size() in _WORDS and values.layout == torch.strided


def _words(values: torch.Tensor) -> torch.Tensor:
    return values.view(_WORDS[values.element_size()])


def _rows(values: torch.Tensor) -> torch.Tensor:
    """The same with zeros at the end, so that rows are whole."""
    lacking = -values.numel() % ROW
    return torch.cat((values, values.new_zeros(lacking))) if lacking else values


def _pieces(values: torch.Tensor) -> Sequence[torch.Tensor]:
    return torch.split(values, PIECE) if values.device.type == "cpu" else (values,)


def _bits(words: torch.Tensor, *, with_values: bool) -> tuple[torch.Tensor, ...]:
    """A bit for each element, the first ones lowest, and the nonzero elements."""
    mask = words.ne(0)
    bits = (_rows(mask).view(torch.int64) * _GATHER).bitwise_right_shift_(56).to(torch.uint8)
    return (bits, words.masked_select(mask)) if with_values else (bits,)


def _mask(bits: torch.Tensor, count: int) -> torch.Tensor:
    table = torch.arange(256, device=bits.device).unsqueeze(1).bitwise_right_shift(torch.arange(8, device=bits.device))
    table = (table & 1).to(torch.bool).view(torch.int64).reshape(-1)
    return table.index_select(0, bits.to(torch.int32)).view(torch.bool)[:count]


def _from_bits(parts: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    bits, nonzero = parts
    words, used = nonzero.new_zeros(count), 0
    pieces = _pieces(words)
    for piece, of_piece in zip(pieces, torch.split(bits, PIECE // 8) if len(pieces) > 1 else (bits,), strict=True):
        mask = _mask(of_piece, piece.numel())
        piece.masked_scatter_(mask, nonzero[used:])
        # A device has one piece only, and does not wait for this number.
        used += int(torch.count_nonzero(mask)) if len(pieces) > 1 else 0
    return words


def _positions(words: torch.Tensor, *, with_values: bool) -> tuple[torch.Tensor, ...]:
    """The number of nonzero elements in each row, the column of each, and these elements."""
    where = words.nonzero().reshape(-1)
    rows = -(-words.numel() // ROW)
    counts = torch.bincount(where.bitwise_right_shift(7), minlength=rows).to(torch.uint8)
    columns = (where & (ROW - 1)).to(torch.uint8)
    return (counts, columns, words.index_select(0, where)) if with_values else (counts, columns)


def _where(counts: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    starts = torch.arange(0, counts.numel() * ROW, ROW, device=counts.device)
    return starts.repeat_interleave(counts.to(torch.int64), output_size=columns.numel()) + columns


def _from_positions(parts: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    counts, columns, nonzero = parts
    return nonzero.new_zeros(count).index_copy_(0, _where(counts, columns), nonzero)


def _bools(parts: Sequence[torch.Tensor], form: str, count: int) -> torch.Tensor:
    if form == BITS:
        return _mask(parts[0], count)
    counts, columns = parts
    return counts.new_zeros(count).index_fill_(0, _where(counts, columns), 1).view(torch.bool)


def _halved(values: torch.Tensor) -> torch.Tensor:
    halves = values.to(torch.float16)
    return values if bool((halves.isinf() & values.isfinite()).any()) else halves


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """All elements as one dimension, in any order; without a copy if they are contiguous in memory."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    return tensor.permute(order).contiguous().reshape(-1)
