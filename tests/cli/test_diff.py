"""`fastckpt diff`: differences of two checkpoints and their size."""

import collections
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastckpt import DdpCheckpointer, StorageType
from fastckpt._core.inspect import values
from fastckpt._core.inspect.diff import BitDistance, Difference, Distance, diff_files
from fastckpt._core.inspect.inventory import InventoryFile
from tests.cli import harm
from tests.cli.conftest import Fastckpt, publish

NAN, INF = float("nan"), float("inf")


def differ(folder: Path, a: Any, b: Any) -> Difference:
    for name, state in (("a.pt", a), ("b.pt", b)):
        torch.save(state, folder / name)
    return diff_files(*(InventoryFile(folder / name, (folder / name).stat().st_size) for name in ("a.pt", "b.pt")))


def distance(folder: Path, a: torch.Tensor, b: torch.Tensor) -> Distance:
    found = differ(folder, {"t": a}, {"t": b})
    assert not (found.only_a or found.only_b) and found.compared == 1
    return found.tensors.get("t", Distance(a.numel()))


def test_diff_counts_frequency_notes_and_cuts_long_values(fastckpt: Fastckpt, tmp_path: Path):
    for name, mark in (("a.pt", "a"), ("b.pt", "b")):
        own = {"tempo": mark * 999, "life": [mark, 1], "step": 5}
        torch.save({"note": mark * 999, "fastckpt": own}, tmp_path / name)
    shown = fastckpt("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert shown.code == 1 and max(map(len, shown.out.splitlines())) < 200
    assert "  note: value 'aaa" in shown.out and "tempo" not in shown.out
    assert "  2 values of how often to save, and of what that costs: --json has them\n" in shown.out
    assert "a" * 999 in fastckpt("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json").out


def test_diff_of_equal_and_of_different_steps_shows_what_differs(fastckpt: Fastckpt, three: Path, tmp_path: Path):
    assert fastckpt("diff", f"{three}@20", three / "checkpoint-20").code == 0
    said = fastckpt("diff", f"{three}@10", f"{three}@30", "--json")
    assert said.code == 1
    assert said.document == {
        "a": f"{three}@10",
        "b": f"{three}@30",
        "equal": False,
        "only_a": [],
        "only_b": [],
        "files": [
            {
                "name": "model.pt",
                "equal": False,
                "compared": 2,
                "only_a": [],
                "only_b": [],
                "changes": [{"name": "step", "what": "value", "a": "10", "b": "30"}],
                "tensors": [{"name": "model.w", "count": 12, "differing": 12, "nans": 0, "max_abs": 20.0}],
            },
            {
                "name": "rank_0.pt",
                "equal": False,
                "compared": 3,
                "only_a": [],
                "only_b": [],
                "changes": [{"name": "state.epoch", "what": "value", "a": "10", "b": "30"}],
                "tensors": [],
            },
        ],
    }
    shown = fastckpt("diff", f"{three}@10", f"{three}@30").out.splitlines()
    assert "model.pt: differ (2 tensors compared, 1 differ)" in shown
    assert ["model.w", "20", "12", "12", "0"] in [line.split() for line in shown]


def test_a_single_file_is_compared_with_the_model(fastckpt: Fastckpt, three: Path, tmp_path: Path):
    torch.save(torch.load(three / "checkpoint-20/model.pt"), tmp_path / "other.pt")
    assert fastckpt("diff", f"{three}@20", tmp_path / "other.pt").code == 0
    assert fastckpt("diff", tmp_path / "other.pt", f"{three}@20").code == 0
    assert fastckpt("diff", tmp_path / "other.pt", f"{three}@30").code == 1
    assert fastckpt("diff", f"{three}@20", f"{three}@30", "--file", "none.pt").code == 2


def test_diff_names_files_that_one_side_lacks(fastckpt: Fastckpt, three: Path, tmp_path: Path):
    (tmp_path / "plain").mkdir()
    torch.save(torch.load(three / "checkpoint-20/model.pt"), tmp_path / "plain/model.pt")
    said = fastckpt("diff", f"{three}@20", tmp_path / "plain", "--json")
    assert said.code == 1 and said.document["only_a"] == ["rank_0.pt"] and said.document["only_b"] == []
    assert said.document["files"][0]["equal"]


def test_diff_finds_no_difference_between_memory_and_storage(fastckpt: Fastckpt, directory: Path):
    with DdpCheckpointer(directory) as checkpointer:
        checkpointer.save_checkpoint(1, {"w": torch.rand(100), "step": 1}, storage_type=StorageType.MEMORY)
        checkpointer.save_checkpoint(2, {"w": torch.rand(100), "step": 2}, storage_type=StorageType.MEMORY)
        publish(directory, 3, state={"w": torch.rand(5), "step": 2})
        assert fastckpt("diff", f"{directory}@1:memory", f"{directory}@2:memory").code == 1
        assert fastckpt("diff", f"{directory}@2:memory", f"{directory}@2").code == 0
        said = fastckpt("diff", f"{directory}@2:memory", f"{directory}@3", "--file", "model.pt", "--json")
        [change] = said.document["files"][0]["changes"]
        assert change == {"name": "w", "what": "shape", "a": "[100]", "b": "[5]"}


def test_diff_names_changes_of_the_structure(tmp_path: Path):
    a = {"x": 1, "gone": torch.zeros(2), "kind": [1], "t": torch.zeros(2), "opt": {0: 1}, "same": ("a", None)}
    b = {"x": "1", "new": {"y": 2}, "kind": (1,), "t": torch.zeros(3), "opt": {"0": 1}, "same": ("a", None)}
    found = differ(tmp_path, a, b)
    assert found.only_a == ["gone", "opt.0"] and found.only_b == ["new", "new.y", "opt.0"]
    assert [(change.name, change.what, change.a, change.b) for change in found.changes] == [
        ("x", "type", "int", "str"),
        ("kind", "type", "list", "tuple"),
        ("t", "shape", "[2]", "[3]"),
    ]
    assert found.compared == 0 and not found.tensors


def test_diff_ignores_sharing_layout_and_the_sign_of_zero(tmp_path: Path):
    """Sharing, layout in memory, Parameter or Tensor, the sign of a zero, the bits of a NaN."""
    base = torch.arange(6.0).view(2, 3)
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    a = {"x": base, "y": base, "t": base.t(), "p": torch.nn.Parameter(base), "nan": torch.tensor([NAN, 0.0])}
    b = {
        "x": base,
        "y": base.clone(),
        "t": base.t().contiguous(),
        "p": base,
        "nan": torch.cat([other_nan, -base[0, :1]]),
    }
    assert not differ(tmp_path, a, b)


def test_another_type_of_elements_is_a_change_and_measured(tmp_path: Path):
    exact = torch.tensor([1.0, 1.0 + 2**-10])
    found = differ(tmp_path, {"t": exact}, {"t": exact.bfloat16()})
    [change] = found.changes
    assert (change.what, change.a, change.b) == ("type", "float32", "bfloat16")
    assert found.tensors["t"].max_abs == 2**-10 and found.tensors["t"].differing == 1


def test_diff_compares_nan_and_infinity(tmp_path: Path):
    found = distance(
        tmp_path, torch.tensor([NAN, 1.0, NAN, INF, INF, 2.0]), torch.tensor([NAN, NAN, 3.0, INF, 1.0, 2.5])
    )
    assert (found.count, found.differing, found.nans, found.max_abs) == (6, 4, 2, INF)
    found = distance(tmp_path, torch.tensor([NAN, 1.0]), torch.tensor([5.0, 1.0]))
    assert (found.differing, found.nans, found.max_abs) == (1, 1, 0)
    found = distance(tmp_path, torch.tensor([complex(INF, 0), 1j]), torch.tensor([complex(-INF, 0), 1 + 1j]))
    assert found.max_abs == INF


def test_diff_writes_infinity_as_valid_json(fastckpt: Fastckpt, tmp_path: Path):
    differ(tmp_path, {"t": torch.tensor([INF]), "x": NAN}, {"t": torch.tensor([0.0]), "x": INF})
    said = fastckpt("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json")
    assert said.document["files"][0]["tensors"][0]["max_abs"] == "inf"
    assert "Infinity" not in said.out and "NaN" not in said.out


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64], ids=str)
def test_diff_compares_whole_numbers_exactly(tmp_path: Path, dtype: torch.dtype):
    limits = torch.iinfo(dtype)
    a, b = torch.tensor([limits.max, 7], dtype=dtype), torch.tensor([limits.min, 8], dtype=dtype)
    assert distance(tmp_path, a, b).max_abs == limits.max - limits.min == 2**64 - 1
    assert distance(tmp_path, a[1:], b[1:]).max_abs == 1
    assert type(distance(tmp_path, a, b).max_abs) is int


def test_diff_sees_values_through_conjugated_and_negated_views(tmp_path: Path):
    number = torch.tensor([1 + 2j, 3 - 1j])
    assert distance(tmp_path, number, number.conj()).max_abs == 4
    assert not differ(tmp_path, {"t": number.conj()}, {"t": number.conj().resolve_conj()})
    negative = number.conj().imag
    assert negative.is_neg()
    assert not differ(tmp_path, {"t": negative}, {"t": negative.resolve_neg()})


def test_diff_compares_quantized_and_narrow_types(tmp_path: Path):
    with warnings.catch_warnings(action="ignore"):
        a = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8)
        b = torch.quantize_per_tensor(torch.arange(4.0), 0.25, 1, torch.qint8)
    found = differ(tmp_path, {"t": a}, {"t": b})
    assert [change.what for change in found.changes] == ["value"] and found.tensors["t"].max_abs == 6
    low, high = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn), torch.tensor([1.0, 4.0]).to(torch.float8_e4m3fn)
    assert distance(tmp_path, low, high).max_abs == 2
    assert differ(tmp_path, {"t": torch.eye(2).to_sparse()}, {"t": (2 * torch.eye(2)).to_sparse()}).tensors


def test_a_damaged_file_is_an_error_of_diff_and_no_difference(fastckpt: Fastckpt, tmp_path: Path):
    differ(tmp_path, {"t": torch.zeros(2000)}, {"t": torch.zeros(2000)})
    harm.truncate(tmp_path / "b.pt")
    said = fastckpt("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json")
    assert said.code == 2 and "b.pt" in said.err and not said.out
    assert fastckpt("diff", tmp_path / "a.pt", tmp_path / "none.pt").code == 2


# --- against numpy

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    torch.manual_seed(draw(st.integers(0, 2**32)))
    tensor = torch.randint(-1000, 1000, shape).to(torch.complex64 if dtype.is_complex else torch.float64)
    if dtype.is_floating_point or dtype.is_complex:
        tensor = tensor * torch.rand(shape) * 10.0 ** draw(st.integers(-3, 1))
    tensor = tensor.to(dtype)
    return tensor.transpose(0, -1) if shape and draw(st.booleans()) else tensor


@st.composite
def perturbed(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    other = tensor.clone()
    for _ in range(draw(st.integers(0, 3)) if tensor.numel() else 0):
        index = tuple(draw(st.integers(0, size - 1)) for size in tensor.shape)
        value = draw(st.sampled_from([0, 1, 3, 200, *([NAN, INF, -INF, 0.1] if tensor.is_floating_point() else [])]))
        other[index] = value
    return other


def expected(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, float]:
    wide = numpy.complex128 if a.is_complex() else numpy.float64 if a.is_floating_point() else numpy.int64
    x, y = a.numpy().astype(wide), b.numpy().astype(wide)
    differing = (x != y) & ~(numpy.isnan(x) & numpy.isnan(y))
    nans = numpy.isnan(x) ^ numpy.isnan(y)
    with numpy.errstate(invalid="ignore"):
        apart = numpy.abs(x - y)[differing & ~nans]
    return int(differing.sum()), int(nans.sum()), apart.max() if apart.size else 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), block=st.sampled_from([1, 2, 5, 1000]))
def test_the_distance_of_tensors_is_that_of_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject, block: int
):
    monkeypatch.setattr(values, "BLOCK", block)
    states: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name in data.draw(st.lists(st.sampled_from("abcde"), unique=True)):
        states[0][name] = data.draw(tensors())
        states[1][name] = data.draw(perturbed(states[0][name]))
    found = differ(tmp_path, *(collections.OrderedDict(state) for state in states))
    assert not (found.only_a or found.only_b or found.changes) and found.compared == len(states[0])
    for name, tensor in states[0].items():
        wanted = expected(tensor, states[1][name])
        got = found.tensors.get(name, Distance(tensor.numel()))
        assert (got.count, got.differing, got.nans) == (tensor.numel(), *wanted[:2])
        assert got.max_abs == pytest.approx(wanted[2], rel=1e-15, abs=0)
        assert (name in found.tensors) == (wanted[0] > 0)


def test_diff_of_large_files_loads_neither_into_memory(tmp_path: Path):
    """Two files of 200 MB, compared by a process that stays far below one of them."""
    big = {f"layer-{i}": torch.full((5_000_000,), float(i)) for i in range(10)}
    torch.save(big, tmp_path / "a.pt")
    big["layer-9"][-1] += 1
    torch.save(big, tmp_path / "b.pt")
    program = (
        "import resource, sys, torch; from fastckpt._core.inspect import diff; from pathlib import Path\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "files = [diff.InventoryFile(Path(name), Path(name).stat().st_size) for name in sys.argv[1:]]\n"
        "found = diff.diff_files(*files)\n"
        "assert found.tensors['layer-9'].max_abs == 1 and len(found.tensors) == 1\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ), check=True)
    assert int(done.stdout) * 1024 < 100e6


def test_a_comparison_of_bits_counts_what_is_equal_as_a_number():
    ours = torch.tensor([0.0, 1.0, torch.nan, 2.0])
    theirs = torch.tensor([-0.0, 1.0, torch.nan, 3.0])
    theirs.view(torch.int32)[2] += 1
    for kind, differing in ((Distance, 1), (BitDistance, 3)):
        found = kind()
        found.add(ours, theirs)
        found.add(ours, ours.clone())
        assert (found.count, found.differing, found.nans, found.max_abs) == (8, differing, 0, 1.0)
