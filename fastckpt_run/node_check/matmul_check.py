"""Check of a processor: products of matrices of whole numbers, with an exactly known result, and their rate."""

import time

import torch

from fastckpt._core.policy.node_check import CheckResult, Verdict

_NONZERO = 256
"""Entries of a row that are not zero: sums of so many products of -1 and 1 are exact in bfloat16, too."""
_REPEATS = 3
_SEED = 20


def devices() -> list[str]:
    """The devices that torch sees: the processor, and the GPUs."""
    return ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]


def factors(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices (size, size) of whole numbers, of which no sum of a product is rounded in ``dtype``.

    In float32 each entry is at most 8, so a sum is below 2**24 up to a size of 2**18, in any order of its terms. In
    bfloat16 entries are -1, 0 and 1, and all but 256 of a row are 0.
    """
    generator = torch.Generator().manual_seed(_SEED)
    largest = 8 if dtype == torch.float32 else 1
    left, right = (torch.randint(-largest, largest + 1, (size, size), generator=generator) for _ in range(2))
    if dtype != torch.float32:
        place = torch.arange(size)
        left *= (place[:, None] + place[None, :]) % max(1, size // _NONZERO) == 0
    return left.to(dtype), right.to(dtype)


def wrong_rows(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor) -> list[int]:
    """The rows of ``product`` that are not those of ``left @ right``, all of them whole numbers on the host.

    A weighted sum of each row is compared with one that is computed in 64-bit integers (Freivalds, 1977). A single
    wrong entry in a row is always found, since no weight is 0; several of them are missed once in a million.
    """
    weights = torch.randint(1, 1 << 20, (right.shape[1],), generator=torch.Generator().manual_seed(_SEED + 1))
    expected = left.long() @ (right.long() @ weights)
    whole = product.long()
    is_whole = (whole.to(product.dtype) == product).all(1)
    return torch.nonzero((whole @ weights != expected) | ~is_whole).flatten().tolist()


def check_matmul(name: str, device: str, dtype: str, size: int, seconds: float) -> CheckResult:
    """Multiply on a device for so many seconds; each product has to be the first one bit for bit, and that be right.

    Args:
        name: The name of the result.
        device: One of `devices`.
        dtype: ``float32`` or ``bfloat16``.
        size: Rows and columns of the factors.
        seconds: Duration; but three multiplications at least.
    """
    kind = getattr(torch, dtype)
    left, right = factors(size, kind)
    there = left.to(device), right.to(device)
    first = there[0] @ there[1]
    spent, repeats, differing = 0.0, 0, 0
    while repeats < _REPEATS or spent < seconds:
        _wait_for(device)
        begin = time.perf_counter()
        again = there[0] @ there[1]
        _wait_for(device)
        spent += time.perf_counter() - begin
        repeats += 1
        differing += not torch.equal(first, again)
    wrong = wrong_rows(left, right, first.cpu())
    rate = 2 * size**3 * repeats / spent / 1e9
    message = ""
    if wrong:
        message = f"computes wrong: {len(wrong)} of {size} rows of a product, first row {wrong[0]}"
    elif differing:
        message = f"computes wrong: {differing} of {repeats} products differ from the first one"
    return CheckResult(name, Verdict.PROBLEM if message else Verdict.OK, message, rate, "GFLOP/s")


def _wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
