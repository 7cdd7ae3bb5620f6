"""`fastckpt diff`: differences of two checkpoints and their size."""

import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fastckpt._core.inspect import values
from fastckpt._core.inspect.diff import BitDistance, Difference, Distance, diff_files
from fastckpt._core.inspect.inventory import InventoryFile
from tests.cli import harm

NAN, INF = float("nan"), float("inf")


def differ(folder: Path, a: Any, b: Any) -> Difference:
    for name, state in (("a.pt", a), ("b.pt", b)):
        torch.save(state, folder / name)
    return diff_files(*(InventoryFile(folder / name, (folder / name).stat().st_size) for name in ("a.pt", "b.pt")))


def distance(folder: Path, a: torch.Tensor, b: torch.Tensor) -> Distance:
    found = differ(folder, {"t": a}, {"t": b})
    assert not (found.only_a or found.only_b) and found.compared == 1
    return found.tensors.get("t", Distance(a.numel()))


def test_diff_counts_frequency_notes_cuts_long_values_and_writes_valid_json(fastckpt, tmp_path):
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    for path, mark, number in ((a, "a", INF), (b, "b", 0.0)):
        own = {"tempo": mark * 999, "life": [mark, 1], "step": 5}
        torch.save({"note": mark * 999, "fastckpt": own, "t": torch.tensor([number]), "x": -number}, path)
    shown = fastckpt("diff", a, b)
    assert shown.code == 1 and max(map(len, shown.out.splitlines())) < 200
    assert "  note: value 'aaa" in shown.out and "tempo" not in shown.out
    assert "  2 values of how often to save, and of what that costs: --json has them\n" in shown.out
    said = fastckpt("diff", a, b, "--json")
    assert "a" * 999 in said.out and "Infinity" not in said.out and "NaN" not in said.out
    assert said.document["files"][0]["tensors"][0]["max_abs"] == "inf"


def test_a_single_file_is_compared_with_the_model_and_a_folder_by_names(fastckpt, three, tmp_path):
    (tmp_path / "plain").mkdir()
    other = tmp_path / "plain/model.pt"
    torch.save(torch.load(three / "checkpoint-20/model.pt"), other)
    assert fastckpt("diff", f"{three}@20", other).code == 0 and fastckpt("diff", other, f"{three}@30").code == 1
    assert fastckpt("diff", f"{three}@20", f"{three}@30", "--file", "none.pt").code == 2
    said = fastckpt("diff", f"{three}@20", tmp_path / "plain", "--json").document
    assert said["only_a"] == ["rank_0.pt"] and said["only_b"] == [] and said["files"][0]["equal"]
    harm.truncate(other)
    for path in (other, tmp_path / "none.pt"):
        said = fastckpt("diff", three / "checkpoint-20/model.pt", path, "--json")
        assert said.code == 2 and path.name in said.err and not said.out, "an error, and no difference"


def test_diff_names_changes_of_the_structure(tmp_path):
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


def test_diff_ignores_sharing_layout_views_the_sign_of_zero_and_the_bits_of_nan(tmp_path):
    base, number = torch.arange(6.0).view(2, 3), torch.tensor([1 + 2j, 3 - 1j])
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    a = {"x": base, "y": base, "t": base.t(), "p": torch.nn.Parameter(base), "nan": torch.tensor([NAN, 0.0])}
    b = {"y": base.clone(), "t": base.t().contiguous(), "p": base, "nan": torch.cat([other_nan, -base[0, :1]])}
    assert not differ(tmp_path, a, b | {"x": base})
    assert number.conj().imag.is_neg()
    for view in (number.conj(), number.conj().imag):
        assert not differ(tmp_path, {"t": view}, {"t": view.resolve_conj().resolve_neg()})
    assert distance(tmp_path, number, number.conj()).max_abs == 4


def test_diff_compares_sparse_quantized_and_narrow_types_and_whole_numbers_exactly(tmp_path):
    for limits in map(torch.iinfo, (torch.int64, torch.uint64)):
        dtype = getattr(torch, limits.dtype)
        a, b = torch.tensor([limits.max, 7], dtype=dtype), torch.tensor([limits.min, 8], dtype=dtype)
        found = distance(tmp_path, a, b).max_abs
        assert found == limits.max - limits.min == 2**64 - 1 and type(found) is int
        assert distance(tmp_path, a[1:], b[1:]).max_abs == 1
    with warnings.catch_warnings(action="ignore"):
        a, b = (torch.quantize_per_tensor(torch.arange(4.0), scale, 1, torch.qint8) for scale in (0.5, 0.25))
    assert differ(tmp_path, {"t": a}, {"t": b}).tensors["t"].max_abs == 6
    found = differ(tmp_path, {"t": torch.tensor([1.0, 1.0 + 2**-10])}, {"t": torch.ones(2).bfloat16()})
    assert [(each.what, each.a, each.b) for each in found.changes] == [("type", "float32", "bfloat16")]
    assert found.tensors["t"].max_abs == 2**-10 and found.tensors["t"].differing == 1
    assert distance(tmp_path, *(torch.tensor([1.0, x]).to(torch.float8_e4m3fn) for x in (2.0, 4.0))).max_abs == 2
    assert differ(tmp_path, {"t": torch.eye(2).to_sparse()}, {"t": (2 * torch.eye(2)).to_sparse()}).tensors


# --- against numpy


def expected(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, float]:
    wide = numpy.complex128 if a.is_complex() else numpy.float64 if a.is_floating_point() else numpy.int64
    x, y = a.numpy().astype(wide), b.numpy().astype(wide)
    differing = (x != y) & ~(numpy.isnan(x) & numpy.isnan(y))
    nans = numpy.isnan(x) ^ numpy.isnan(y)
    with numpy.errstate(invalid="ignore"):
        apart = numpy.abs(x - y)[differing & ~nans]
    return int(differing.sum()), int(nans.sum()), apart.max() if apart.size else 0


@pytest.mark.parametrize("block", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64, torch.int64, torch.uint8, torch.bool])
def test_the_distance_of_tensors_is_that_of_numpy(tmp_path, monkeypatch, block, dtype):
    monkeypatch.setattr(values, "BLOCK", block)
    torch.manual_seed(block)
    states: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for shape in ((), (0,), (7,), (3, 0, 2), (4, 6), (2, 3, 5)):
        ours = (torch.randint(-1000, 1000, shape) * torch.rand(shape) / 8).to(dtype)
        ours = ours.transpose(0, -1) if len(shape) > 1 else ours
        theirs = ours.clone()
        odd = [NAN, INF, -INF, 0.1] if dtype.is_floating_point or dtype.is_complex else []
        for value in [0, 1, 3, 200, *odd][: ours.numel()] if len(shape) != 2 else []:
            theirs[tuple(torch.randint(size, ()) for size in ours.shape)] = value
        states[0][str(shape)], states[1][str(shape)] = ours, theirs
    found = differ(tmp_path, *states)
    assert not (found.only_a or found.only_b or found.changes) and found.compared == len(states[0])
    for name, tensor in states[0].items():
        wanted = expected(tensor, states[1][name])
        got = found.tensors.get(name, Distance(tensor.numel()))
        assert (got.count, got.differing, got.nans) == (tensor.numel(), *wanted[:2])
        assert got.max_abs == pytest.approx(wanted[2], rel=1e-15, abs=0)
        assert (name in found.tensors) == (wanted[0] > 0)


def test_a_comparison_of_bits_counts_what_is_equal_as_a_number():
    ours, theirs = torch.tensor([0.0, 1.0, torch.nan, 2.0]), torch.tensor([-0.0, 1.0, torch.nan, 3.0])
    theirs.view(torch.int32)[2] += 1
    for kind, differing in ((Distance, 1), (BitDistance, 3)):
        found = kind()
        found.add(ours, theirs)
        found.add(ours, ours.clone())
        assert (found.count, found.differing, found.nans, found.max_abs) == (8, differing, 0, 1.0)
