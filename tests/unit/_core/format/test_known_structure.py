"""Each way in which a state may change between two saves is noticed, whether it is compared in C or part by part."""

import copy
import gc
import math
import struct
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils import swap_tensors

from fastckpt._core.format import known_structure
from fastckpt._core.format.known_structure import KnownStructure, Unsuited
from fastckpt._core.format.skeleton import MAX_COMMENT
from fastckpt._core.format.structure import Opaque, Structure
from fastckpt._core.torch_private.tensors import storage_key
from tests.unit._core.format.baking import Baker

State = dict[str, Any]
Pair = namedtuple("Pair", "one other")
BLOCK = 8
"""Tensors that are compared together: so few that the states here have several times as many."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_structure, "BLOCK", BLOCK)


class Bag(dict):  # type: ignore[type-arg]
    """A subclass of dict, of which a pickle has the name."""


class Marked(torch.Tensor):
    """A subclass of tensor."""


def training() -> State:
    """A model's state, an optimizer's, and leaves of each kind."""
    whole = torch.randn(4, 4)
    model = OrderedDict(a=torch.randn(3, 3), b=torch.nn.Parameter(torch.randn(4, 4)), first=whole[:2], last=whole[2:])
    model["square"] = torch.randn(5, 5)
    model["wave"] = torch.randn(3, dtype=torch.complex64)
    vars(model.setdefault("marked", torch.ones(2))).update(one="x", two=True)
    model._metadata = OrderedDict([("", {"version": 1}), ("layer", {"version": 2})])  # type: ignore[attr-defined]
    moments = {i: {"step": torch.tensor(1.0), "exp_avg": torch.randn(3, 3)} for i in range(3)}
    betas = (0.9, 0.999)
    groups = [{"lr": 0.1, "betas": betas, "params": [0, 1]}, {"lr": 0.2, "betas": betas, "params": [2]}]
    kinds = {"dtype": torch.float32, "device": torch.device("cpu"), "size": torch.Size([2, 3]), "none": None, "": ()}
    leaves = {"step": 7, "zero": 0.0, "flag": True, "text": "x", "large": 1 << 70, "tuple": (1, [2.5]), **kinds}
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}, "leaves": leaves}


def moved(mapping: dict[Any, Any], key: Any) -> None:
    mapping[key] = mapping.pop(key)


def renamed(mapping: dict[Any, Any], old: Any, new: Any) -> None:
    """Another key in the same place."""
    items = [(new if key is old else key, value) for key, value in mapping.items()]
    mapping.clear()
    mapping.update(items)


def without_grad_mode(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.requires_grad_(not tensor.requires_grad)


def over(tensor: torch.Tensor, other: torch.Tensor, offset: int = 0) -> None:
    """Have a tensor view the storage of another, in its own layout."""
    tensor.data = torch.empty(0).set_(other.untyped_storage(), offset, tensor.shape, tensor.stride())


def quantized(tensor: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(tensor, 0.1, 2, torch.quint8)


def put(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


def set_aside(source: dict[Any, Any] | list[Any], key: Any, target: dict[Any, Any] | list[Any]) -> None:
    """Have a part go to another container."""
    part = source.pop(key)
    target.append(part) if isinstance(target, list) else target.update(x=part)


def groups(state: State) -> Any:
    return state["optimizer"]["param_groups"]


def moments(state: State) -> Any:
    return state["optimizer"]["state"]


def marks(state: State) -> Any:
    """The attributes of a tensor."""
    return vars(state["model"]["marked"])


NOTICED: dict[str, Callable[[State], Any]] = {
    "an attribute gone": lambda s: marks(s).clear(),
    "another value of an attribute": lambda s: marks(s).update(one="y"),
    "a value of an attribute that equals it": lambda s: marks(s).update(two=1),
    "another name of an attribute": lambda s: renamed(marks(s), "one", "three"),
    "attributes in another order": lambda s: moved(marks(s), "one"),
    "one more attribute": lambda s: marks(s).update(three=None),
    "a key added": lambda s: s["model"].update(extra=torch.ones(2)),
    "a key gone": lambda s: s["model"].pop("a"),
    "a key renamed": lambda s: renamed(s["leaves"], "step", "steps"),
    "a key that equals another of its type": lambda s: renamed(moments(s), 1, True),
    "a key that is a float": lambda s: renamed(moments(s), 0, -0.0),
    "a dict in another order": lambda s: moved(s["leaves"], "step"),
    "an OrderedDict in another order of equal layouts": lambda s: s["model"].move_to_end("first"),
    "an OrderedDict in place of a dict": lambda s: s.update(leaves=OrderedDict(s["leaves"])),
    "a subclass of dict": lambda s: s.update(leaves=Bag(s["leaves"])),
    "a tuple in place of a list": lambda s: groups(s)[0].update(params=(0, 1)),
    "a named tuple in place of a tuple": lambda s: groups(s)[0].update(betas=Pair(0.9, 0.999)),
    "a longer list": lambda s: groups(s)[1]["params"].append(3),
    "an item that went to the next list": lambda s: set_aside(groups(s)[0]["params"], -1, groups(s)[1]["params"]),
    "an attribute of a state dict": lambda s: setattr(s["model"], "note", "x"),
    "no attributes of a state dict": lambda s: delattr(s["model"], "_metadata"),
    "another version in the metadata": lambda s: s["model"]._metadata["layer"].update(version=2.0),
    "metadata in another order": lambda s: s["model"]._metadata.move_to_end(""),
    "one container that became two": lambda s: groups(s)[0].update(betas=tuple([0.9, 0.999])),
    "two containers that became one": lambda s: moments(s).update({1: moments(s)[2]}),
    "an int that became a float": lambda s: s["leaves"].update(step=7.0),
    "an int that became a bool": lambda s: s["leaves"].update(step=True),
    "a bool that became another": lambda s: s["leaves"].update(flag=False),
    "an int beyond 64 bits": lambda s: s["leaves"].update(step=1 << 63),
    "a large int that became small": lambda s: s["leaves"].update(large=3),
    "a text": lambda s: s["leaves"].update(text="y"),
    "a dtype": lambda s: s["leaves"].update(dtype=torch.float64),
    "a size": lambda s: s["leaves"].update(size=torch.Size([3, 2])),
    "a number that became a tensor": lambda s: s["leaves"].update(step=torch.tensor(7)),
    "an object": lambda s: s["leaves"].update(text={1, 2}),
    "a complex number": lambda s: s["leaves"].update(step=complex(0.0, -0.0)),
    "dtype in place": lambda s: put(s["model"]["a"], s["model"]["a"].data.double()),
    "an equally large dtype in place": lambda s: put(s["model"]["a"], s["model"]["a"].data.view(torch.int32)),
    "strides in place": lambda s: s["model"]["square"].t_(),
    "offset in place": lambda s: over(s["model"]["first"], s["model"]["last"], 1),
    "requires_grad without grad mode": lambda s: without_grad_mode(s["model"]["a"]),
    "requires_grad no more": lambda s: without_grad_mode(s["model"]["b"]),
    "a larger storage": lambda s: s["model"]["a"].untyped_storage().resize_(100),
    "a tensor in a larger storage": lambda s: s["model"].update(a=torch.randn(4, 3)[:3]),
    "a storage shared with another": lambda s: over(moments(s)[0]["exp_avg"], s["model"]["a"]),
    "another pair that shares": lambda s: s["model"].update(first=s["model"]["last"], last=s["model"]["first"]),
    "a parameter in place of a tensor": lambda s: s["model"].update(a=torch.nn.Parameter(s["model"]["a"], False)),
    "a class in place": lambda s: setattr(s["model"]["b"], "__class__", torch.Tensor),
    "tensors that are swapped": lambda s: swap_tensors(s["model"]["a"], moments(s)[0]["step"]),
    "a subclass in place": lambda s: setattr(s["model"]["a"], "__class__", Marked),
    "a conjugate in place": lambda s: put(s["model"]["wave"], s["model"]["wave"].conj()),
    "a negative": lambda s: s["model"].update(a=torch.randn(3, 3, dtype=torch.complex64).conj().imag),
    "an attribute": lambda s: setattr(s["model"]["a"], "tag", "mine"),
    "a nested tensor": lambda s: s["model"].update(a=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "a sparse tensor in rows": lambda s: s["model"].update(a=s["model"]["a"].to_sparse_csr()),
    "a sparse tensor of that layout, in place": lambda s: swap_tensors(s["model"]["a"], torch.eye(3).to_sparse()),
    "a quantized tensor": lambda s: s["model"].update(a=quantized(s["model"]["a"])),
    "a long text": lambda s: s["leaves"].update(text="x" * (MAX_COMMENT + 5)),
    "nothing": lambda s: s.clear(),
}
SEEN: dict[str, Callable[[State], Any]] = {
    "bytes": lambda s: s["model"]["a"].add_(1),
    "minus zero": lambda s: s["leaves"].update(zero=-0.0),
    "nan": lambda s: s["leaves"].update(zero=math.nan),
    "numbers": lambda s: s["leaves"].update(step=-(1 << 63), tuple=(5, [0.5])),
    "another tensor of that layout": lambda s: s["model"].update(a=torch.randn(3, 3)),
    "a storage that moved": lambda s: put(s["model"]["a"], torch.randn(3, 3)),
    "equal dicts": lambda s: s["optimizer"].update(state={k: {**v} for k, v in moments(s).items()}),
    "equal keys": lambda s: renamed(s["leaves"], "step", "".join(["st", "ep"])),
    "two views of another storage": lambda s: s["model"].update(first=(w := torch.randn(4, 4))[:2], last=w[2:]),
    "swapped with an equal one": lambda s: swap_tensors(s["model"]["a"], moments(s)[0]["exp_avg"]),
}


@pytest.fixture
def baker(tmp_path: Path) -> Any:
    made = Baker(tmp_path / "model.pt")
    yield made
    made.close()


def known_of(state: Any) -> KnownStructure:
    return KnownStructure(state, Structure(state))


def assert_as_taken_apart(known: KnownStructure, before: list[Any], state: Any) -> bool:
    """A match is right: taken apart, the state has the shape before, and these parts. Returns whether it matches."""
    parts = known.match(state)
    if parts is None:
        return False
    structure = Structure(state)
    assert structure.shape == before
    assert [*map(id, parts.tensors)] == [*map(id, structure.tensors)]
    assert [*parts.indices] == structure.indices
    assert [*map(storage_key, parts.storages)] == [*map(storage_key, structure.storages)]
    assert [*map(id, parts.numbers)] == [*map(id, structure.numbers)]
    return True


@pytest.mark.parametrize(("changes", "is_noticed"), [(NOTICED, True), (SEEN, False)], ids=["structure", "contents"])
def test_a_change_of_the_structure_alone_is_noticed_and_each_is_saved_as_torch_saves_it(
    baker: Baker, changes: dict[str, Callable[[State], Any]], is_noticed: bool
) -> None:
    for _ in range(3):
        baker.check(training())
    for name, change in changes.items():
        print(name)
        state = training()
        known, shape = known_of(state), Structure(state).shape
        assert assert_as_taken_apart(known, shape, state)
        baker.check(state)
        change(state)
        assert assert_as_taken_apart(known, shape, state) is not is_noticed
        for each in (state, training()):
            baker.check(each)


def test_what_does_not_compare_or_is_not_in_plain_memory_does_not_match() -> None:
    tensor = torch.ones(3)
    known = known_of({"a": 1, "b": tensor})
    with torch.inference_mode():
        inferred = torch.ones(3)
    for other in (torch.ones(3, device="meta"), tensor.to_mkldnn(), inferred):
        assert known.match({"a": 1, "b": other}) is None
    torch.vmap(lambda each: [each, known.match({"a": 1, "b": each})][0])(torch.ones(2, 3))
    assert known.match({"a": 1, torch.ones(2): tensor}) is None
    assert known.match({"a": 1, "b": tensor}) is not None
    vars(tensor).update(tag="x")
    known = known_of({"a": 1, "b": tensor})
    vars(tensor).update(tag=torch.ones(2))
    assert known.match({"a": 1, "b": tensor}) is None


def test_a_list_in_itself_is_told_from_one_in_another(baker: Baker) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    known = known_of({"a": loop})
    assert known.match({"a": [1, [1, loop]]}) is None and known.match({"a": [1, [2]]}) is None
    assert known_of({"a": [1, [2]]}).match({"a": loop}) is None
    for step in range(3):
        loop[0] = step
        assert known.match({"a": loop}) is not None
        baker.save({"a": loop})
        got = torch.load(baker.path)["a"]
        assert got[0] == step and got[1] is got


@pytest.mark.parametrize("between", [0, BLOCK], ids=["in a block", "in other blocks"])
def test_a_tensor_that_stands_twice_is_told_from_two_that_share(baker: Baker, between: int) -> None:
    rest = {f"{i}": torch.full((2,), i) for i in range(between)}
    tensor, other = torch.randn(3), torch.randn(3)
    state, twins = {"a": tensor, **rest, "b": tensor}, {"a": other, **rest, "b": other.detach()}
    known, shape = known_of(state), Structure(state).shape
    assert assert_as_taken_apart(known, shape, twins | {"b": other})
    assert known.match(twins) is None
    assert known.match(twins | {"b": other.clone()}) is None
    assert known_of(twins).match(state) is None and known_of(twins).match(twins) is not None
    for each in (state, state, state, twins, twins, state):
        baker.check(each)


def test_changes_beyond_the_first_block_of_tensors_are_noticed(baker: Baker) -> None:
    state: State = {f"{i}": torch.full((2,), i) for i in range(2 * BLOCK + 3)}
    last = [*state][-1]
    known, shape = known_of(state), Structure(state).shape
    assert assert_as_taken_apart(known, shape, state)
    for _ in range(3):
        baker.check(state)
    for other in (state["0"], torch.ones(3), torch.ones(2, dtype=torch.int32), state["0"][:]):
        assert known.match(state | {last: other}) is None
    baker.check(state | {last: other})
    baker.check(state)


SMALL: list[Any] = [{}, [], (), {"a": 1}, {"a": torch.ones(1)}, [torch.ones(())], {"a": {}, "b": {}}, OrderedDict()]
OTHERS = [{}, [], (), [1], {"a": 1.0}, {"a": torch.ones(2)}, OrderedDict(), OrderedDict(a=1), [[[1]]]]


def test_small_states_match_themselves(baker: Baker) -> None:
    for state in (*SMALL, [[[]]], {"a": ((),) * 3}):
        known, shape = known_of(state), Structure(state).shape
        assert assert_as_taken_apart(known, shape, state)
        for other in OTHERS:
            assert assert_as_taken_apart(known_of(state), shape, other) == (Structure(other).shape == shape)
        for _ in range(3):
            baker.check(state)


def test_what_takes_more_than_a_comparison_is_taken_apart_each_time(baker: Baker) -> None:
    for state in ({"a": 1j}, {(1, 2): 3}, {True: 1}, {0.5: 1}, 1, torch.ones(2)):
        with pytest.raises(Unsuited):
            known_of(state)
        for _ in range(3):
            baker.check(state)


def test_zeros_and_nans_of_complex_numbers_are_saved_bit_for_bit(baker: Baker) -> None:
    parts = (0.0, -0.0, math.nan, -math.nan, math.copysign(math.inf, -1))
    for number in (complex(real, imaginary) for real in parts for imaginary in parts):
        baker.save({"a": number})
        got = torch.load(baker.path)["a"]
        assert struct.pack("2d", got.real, got.imag) == struct.pack("2d", number.real, number.imag)


def test_no_tensor_is_kept() -> None:
    state = training()
    known = known_of(state)
    tensors = [weakref.ref(each) for each in Structure(state).tensors]
    state = copy.deepcopy(state)
    gc.collect()
    assert not any(each() is not None for each in tensors)
    assert known.match(state) is not None


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(changes=st.lists(st.sampled_from([*NOTICED.values(), *SEEN.values()]), min_size=6, max_size=6))
def test_changes_in_any_order_load_as_torch_saves_them(changes: list[Callable[[State], Any]], tmp_path_factory: Any):
    """One for which there is no place any more, after those before it, changes nothing, or a part of it."""
    state = training()
    with closing(Baker(tmp_path_factory.mktemp("image") / "model.pt")) as baker, suppress(Opaque):
        for change in changes:
            known, shape = None, Structure(state).shape
            with suppress(Unsuited):
                known = known_of(state)
            for _ in range(2):
                baker.check(state)
            with suppress(LookupError, AttributeError, RuntimeError, TypeError):
                change(state)
            if known is not None:
                assert_as_taken_apart(known, shape, state)
            baker.check(state)
