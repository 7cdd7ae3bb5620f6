"""Encoded tensors come back bit for bit."""

import math

import pytest
import torch

from fastckpt._core.offload.codecs import PIECE, ROW, Encoded, decode, encode

SHAPES = [
    (torch.float32, 0),
    (torch.float32, 2 * PIECE + 77),
    (torch.bfloat16, ROW - 1),
    (torch.float8_e4m3fn, ROW),
    (torch.int16, ROW + 1),
    (torch.bool, PIECE + 1),
    (torch.uint8, PIECE),
    (torch.complex128, 2 * PIECE),
]
"""Types of each width, and lengths around each limit."""


def sparse(count: int, density: float, dtype: torch.dtype) -> torch.Tensor:
    """Random bits, where they are not zero: NaNs with payloads, denormal and negative numbers are among them."""
    generator = torch.Generator().manual_seed(count)
    if dtype == torch.bool:
        return torch.rand(count, generator=generator) < density
    words = torch.randint(1, 256, (count, dtype.itemsize), dtype=torch.uint8, generator=generator)
    words[torch.rand(count, generator=generator) >= density] = 0
    return words.reshape(-1).view(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def came_back(tensor: torch.Tensor, encoded: Encoded) -> bool:
    """Return whether what is read from storage, in buffers of the described types and lengths, is the tensor."""
    description = encoded.description
    parts = [torch.empty(count, dtype=dtype) for dtype, count in description.parts]
    for part, written in zip(parts, encoded.parts, strict=True):
        assert written.is_contiguous() and written.dim() == 1
        part.view(torch.uint8).copy_(written.view(torch.uint8))
    assert encoded.nbytes == description.nbytes == sum(part.numel() * part.element_size() for part in parts)
    back = decode(description, parts)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape) and back.is_contiguous()
    return torch.equal(bits(back), bits(tensor))


@pytest.mark.parametrize(("dtype", "count"), SHAPES, ids=str)
def test_a_tensor_of_any_density_comes_back_bit_for_bit(dtype: torch.dtype, count: int) -> None:
    for density in (0.0, 0.001, 0.05, 0.125, 0.3, 0.94, 0.97, 1.0) if count <= 1000 else (0.05, 0.3):
        tensor = sparse(count, density, dtype)
        assert came_back(tensor, encode(tensor)), density


def special() -> torch.Tensor:
    """Negative zero, NaNs with payloads and a denormal are no zeros."""
    words = torch.zeros(1024, dtype=torch.int32)
    words[::64] = torch.tensor([-(2**31), 0x7FC00001, 0x7F800001, 1], dtype=torch.int32).repeat(4)
    return words.view(torch.float32)


@pytest.mark.parametrize(
    ("tensor", "form"),
    [
        (special(), "positions"),
        (torch.tensor([0, 1, 2, 255] * 100, dtype=torch.uint8).view(torch.bool), "dense"),  # bytes other than 0 and 1
        (torch.eye(64).expand(4, 64, 64), ""),
        (torch.tensor(0.0), ""),
        (torch.randn(2, 3, 4, 5).relu().to(memory_format=torch.channels_last).requires_grad_(), ""),
        ((torch.randn(64, dtype=torch.complex64) * torch.eye(64)).conj().imag, ""),
    ],
)
def test_tensors_with_any_bits_and_strides_come_back_contiguous(tensor: torch.Tensor, form: str) -> None:
    encoded = encode(tensor)
    assert came_back(tensor.detach().resolve_conj().resolve_neg(), encoded)
    assert not any(part.requires_grad for part in encoded.parts) and form in ("", encoded.form)
    if form == "positions":
        assert encoded.parts[-1].numel() == 16


@pytest.mark.parametrize("value", [-7e4, math.inf])
def test_half_precision_makes_no_finite_number_infinite(value: float) -> None:
    tensor = torch.full((1000,), value)
    encoded = encode(tensor, half=True)
    assert encoded.description.stored == (torch.float32 if math.isfinite(value) else torch.float16)
    assert torch.equal(decode(encoded.description, encoded.parts).isfinite(), tensor.isfinite())


def test_parts_of_another_length_are_refused() -> None:
    encoded = encode(torch.eye(64))
    with pytest.raises(ValueError, match=r"parts of a positions tensor are .*; expected"):
        decode(encoded.description, [part[:-1] for part in encoded.parts])
