"""Random states of two ranks, equal or unlike in one entry: each has its own again beside what the first one saved."""

import copy
import os
import random
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fastckpt._core.replicas.own_entries import entries, own_entries, with_own
from fastckpt._core.replicas.replica_faults import unlike_entries
from fastckpt._core.replicas.state_digest import digest_of
from tests.faults.diary import digest

COUNT = int(os.environ.get("FASTCKPT_FUZZ_STATES", "10000"))
State = dict[str, Any]
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)


def leaf(chance: random.Random) -> Any:
    kind = chance.randrange(9)
    if kind < 5:
        dtype, shape = chance.choice(DTYPES), [chance.randint(0, 4) for _ in range(chance.randint(0, 3))]
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
        whole = (torch.randn(shape, generator=generator) * 9).to(dtype)
        return whole.t() if whole.dim() == 2 and chance.random() < 0.5 else whole
    if kind == 5:
        return [leaf(chance) for _ in range(chance.randint(0, 3))]
    return chance.choice([chance.randrange(1 << 40), chance.random(), None, True, "text", "", (1, 2.5), float("nan")])


def node(chance: random.Random, depth: int = 0) -> State:
    made: State = OrderedDict() if chance.random() < 0.3 else {}
    for number in range(chance.randint(1, 4)):
        key = chance.choice([number, str(number), f"name{number}", f"a.b{number}"])
        made[key] = node(chance, depth + 1) if depth < 3 and chance.random() < 0.4 else leaf(chance)
    return made


def change(state: State, chance: random.Random) -> None:
    """Change one entry: its value, shape or type; or add one, or remove it."""
    _, path, found = chance.choice([*entries(state)])
    inside: Any = state
    for key in path[:-1]:
        inside = inside[key]
    key, how = path[-1], chance.choice(("value", "shape", "type", "absent", "more"))
    if how == "more":
        inside["another"] = torch.ones(3)
    elif how == "absent" and len(inside) > 1:
        del inside[key]
    elif isinstance(found, torch.Tensor) and found.numel() and how == "shape":
        inside[key] = torch.cat([found.reshape(-1), found.reshape(-1)])
    elif isinstance(found, torch.Tensor) and found.numel() and how != "type":
        inside[key] = found.clone(memory_format=torch.contiguous_format)
        inside[key].view(-1).view(torch.uint8)[chance.randrange(found.nbytes)] ^= 1
    else:
        inside[key] = "another" if found != "another" else 5


def plain(value: Any) -> Any:
    """What has the same digest if it is the same, bit for bit, and of the same types."""
    if isinstance(value, Mapping):
        return {repr(key): plain(each) for key, each in sorted(value.items(), key=lambda item: repr(item[0]))}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(plain, value)]
    return value if isinstance(value, torch.Tensor) else f"{type(value).__name__} {value!r}"


@pytest.mark.parametrize(
    "count", [pytest.param(100, id="some"), pytest.param(COUNT, marks=pytest.mark.campaign, id="many")]
)
def test_each_rank_has_its_own_again(count: int) -> None:
    for case in range(count):
        chance = random.Random(case)
        states = [state := node(chance), copy.deepcopy(state)]
        if chance.random() < 0.8:
            change(states[chance.randrange(2)], chance)
        unlike = unlike_entries([{name: digest_of(each) for name, _, each in entries(state)} for state in states])
        for state in states:
            found = with_own(copy.deepcopy(states[0]), own_entries(state, unlike, 2), 2, 0)
            assert digest([plain(found)]) == digest([plain(state)]), (case, found, state)
        equal = digest([plain(states[0])]) == digest([plain(states[1])])
        assert bool(unlike) != equal, (case, unlike)
