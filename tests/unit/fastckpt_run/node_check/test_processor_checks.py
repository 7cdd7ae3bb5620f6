"""Products with a known result, and patterns in memory: whatever is wrong in one is found at its place."""

import math

import pytest
import torch

from fastckpt._core.policy.node_check import Verdict
from fastckpt_run.node_check import matmul_check
from fastckpt_run.node_check.matmul_check import check_matmul, factors, wrong_rows
from fastckpt_run.node_check.memory_check import first_difference
from tests.support.tables import for_each

SIZE = 256


def flip_lowest_bit(product):
    product.view(torch.int32 if product.dtype == torch.float32 else torch.int16)[7, 3] ^= 1


def set_to_nan(product):
    product[7, 3] = math.nan


def swap_columns(product):
    product[7, [3, 4]] = product[7, [4, 3]]


@for_each(torch.float32, torch.bfloat16)
def test_a_product_is_exact_in_each_type_whatever_the_order_of_its_terms_and_a_wrong_entry_is_found_in_its_row(dtype):
    left, right = factors(SIZE, dtype)
    product = left @ right
    assert torch.equal(product.long(), left.long() @ right.long())
    assert wrong_rows(left, right, product) == []
    # The bounds that make it so, for all sizes: sums of 256 terms of 1; of 2**18 terms of 64.
    largest = (left.abs().float() @ right.abs().float().amax(1)).max()
    assert largest <= (2**24 if dtype == torch.float32 else 2**8)
    for damage in (flip_lowest_bit, set_to_nan, swap_columns):
        damaged = product.clone()
        damage(damaged)
        assert not torch.equal(damaged, product)
        assert wrong_rows(left, right, damaged) == [7]


class Faulty(torch.Tensor):
    """A matrix on a processor whose products are wrong from the third one on, or from the first one."""

    first_wrong = 3
    made = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function in (torch.Tensor.matmul, torch.Tensor.__matmul__) and result.is_floating_point():
            cls.made += 1
            if cls.made >= cls.first_wrong:
                result[5, 5] += 1
        return result


@pytest.mark.parametrize(
    ("first_wrong", "message"),
    [(1, "computes wrong: 1 of 256 rows of a product, first row 5"), (3, "computes wrong: 2 of 3 products differ")],
)
def test_a_processor_that_computes_wrong_always_or_sometimes_has_a_problem(monkeypatch, first_wrong, message):
    pair = tuple(each.as_subclass(Faulty) for each in factors(SIZE, torch.float32))
    monkeypatch.setattr(matmul_check, "factors", lambda *_: pair)
    monkeypatch.setattr(Faulty, "first_wrong", first_wrong)
    monkeypatch.setattr(Faulty, "made", 0)
    result = check_matmul("matmul cpu", "cpu", "float32", SIZE, 0.0)
    assert result.verdict is Verdict.PROBLEM and result.message.startswith(message)


@for_each(None, 0, (1 << 20) - 1, 1 << 20, (3 << 20) - 1)
def test_the_first_difference_of_two_buffers_is_found(place):
    one, other = bytearray(b"\x55" * (3 << 20)), bytearray(b"\x55" * (3 << 20))
    if place is not None:
        other[place] ^= 1
    assert first_difference(one, other) == place
