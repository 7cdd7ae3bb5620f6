"""What a script may log: its checks, and the newest value of each name."""

import math

import numpy as np
import pytest
import torch

from fastckpt._core.ipc.messages import Logged
from fastckpt._core.logged_values import LONGEST, MOST, LoggedValues
from fastckpt._core.saver.ranks_values import RanksValues
from fastckpt.errors import ConfigError
from tests.support.tables import for_each


@for_each(
    (1, 1.0), (0.5, 0.5), (True, 1.0), (np.float32(2), 2.0), (np.array([3.0]).squeeze(), 3.0),
    (torch.tensor(4.0), 4.0), (torch.tensor([5]), 5.0), (torch.tensor(6.0, requires_grad=True), 6.0),
    (math.inf, math.inf), (torch.tensor(-math.inf), -math.inf), (math.nan, math.nan),
)  # fmt: skip
def test_numbers_and_tensors_of_one_element_are_logged(given, number):
    values = LoggedValues()
    values.put(np.int64(3), {"loss": given})
    assert values.take() == (3, pytest.approx({"loss": number}, nan_ok=True))


@for_each(
    (-1, {"a": 1}, "the step of metrics.log is -1; give a whole number, 0 or more"),
    (1, [("a", 1)], "the values of metrics.log are a list; give a dictionary"),
    (1, {"": 1}, f"a name of metrics.log is ''; give 1 to {LONGEST} printable"),
    (1, {"a" * (LONGEST + 1): 1}, "a name of metrics.log is"),
    (1, {"a": "0.5"}, "the value 'a' of metrics.log is '0.5'; give a number, or a tensor of one element"),
    (1, {"a": torch.zeros(2)}, r"the value 'a' of metrics.log is a Tensor; .* such as loss.mean\(\)"),
    (1, {"a": torch.zeros(1, device="meta")}, "the value 'a' of metrics.log is a Tensor; give"),
)
def test_what_cannot_be_logged_is_refused_with_its_value_and_the_remedy(step, named, message):
    values = LoggedValues()
    with pytest.raises(ConfigError, match=message):
        values.put(step, {"good": 1} | named if isinstance(named, dict) else named)
    assert values.take() == (0, {})


def test_names_are_limited_in_number_but_not_the_calls():
    values = LoggedValues()
    for step in range(3):
        values.put(step, {f"name{number}": step for number in range(MOST)})
    with pytest.raises(ConfigError, match=f"'more' would be name {MOST + 1} or later .* may use {MOST}: leave out"):
        values.put(9, {"name0": 9, "more": 9})
    assert values.take() == (2, {f"name{number}": 2.0 for number in range(MOST)})


def test_the_saver_keeps_the_newest_values_of_each_rank_in_bounded_memory():
    kept = RanksValues()
    kept.put(1, Logged(5, {"a": 1.0}))
    kept.put(0, Logged(6, {"x" * 1000: 1.0}))
    for start in range(3):
        kept.put(1, Logged(7 + start, {f"{start}.{number}": 1.0 for number in range(MOST)}))
    found = kept.by_rank()
    assert found[0] == (6, {"x" * LONGEST: 1.0})
    assert found[1][0] == 9 and len(found[1][1]) == MOST and "2.99" in found[1][1]
