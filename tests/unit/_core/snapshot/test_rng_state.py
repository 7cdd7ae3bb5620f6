"""States of random generators, captured and restored."""

import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fastckpt._core.snapshot.rng_state import restore_rng, rng_state


@pytest.fixture(autouse=True)
def numpys_own() -> Iterator[None]:
    before = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(before)


def draws() -> list[Any]:
    """Of each generator; of a normal variate numpy and Python keep a second one."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.normal(size=3).tolist(),
        np.random.randint(1 << 30, size=700).tolist(),
        torch.rand(2).tolist(),
    ]


def as_saved(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint gives back of it."""
    file = io.BytesIO()
    torch.save(state, file)
    return dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
def test_all_generators_continue_their_sequence_after_a_restore(kind: Any):
    np.random.set_bit_generator(kind(5))
    np.random.normal()
    random.gauss(0, 1)
    state = as_saved(rng_state())
    expected = draws()
    assert draws() != expected
    restore_rng(state)
    assert draws() == expected


def test_random_states_of_an_earlier_version_restore_torch_alone():
    state = {"cpu": torch.get_rng_state()}
    expected = torch.rand(2).tolist()
    random.seed(3)
    np.random.seed(3)
    others = random.getstate(), np.random.get_state()[1].tolist()
    restore_rng(state)
    assert torch.rand(2).tolist() == expected
    assert (random.getstate(), np.random.get_state()[1].tolist()) == others


def test_a_numpy_generator_of_another_kind_is_kept_with_a_warning(caplog: pytest.LogCaptureFixture):
    state = rng_state()
    np.random.set_bit_generator(np.random.PCG64(1))
    before = np.random.get_state(legacy=False)
    restore_rng(state)
    assert np.random.get_state(legacy=False) == before
    assert "the state of MT19937, and numpy.random uses PCG64 now" in caplog.text
