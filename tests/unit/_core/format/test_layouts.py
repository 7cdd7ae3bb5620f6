"""Files of other layouts: torch and safetensors read them, or bytes as they are, at places that stay between saves."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.utils import _create_file_view

from fastckpt._core.format.distcp import GROWTH, ShardPlan, ShardPlanner
from fastckpt._core.format.raw import Raw, RawPlanner
from fastckpt._core.format.safetensors import DTYPES, SafetensorsPlanner, Tensors
from fastckpt._core.transfer.host_copy import HostCopy
from fastckpt._core.transfer.image import Image
from fastckpt.errors import NotLoadable

Items = Sequence[torch.Tensor | bytes]


def image(path: Path, plan: Any, capacity: int | None = None) -> bytes:
    """What a save by this plan makes of a file, written over if it fits."""
    size = path.stat().st_size if path.exists() else 0
    if capacity or not plan.skeleton.fits(size):
        path.unlink(missing_ok=True)
        path.write_bytes(b"\xa5" * (capacity or plan.skeleton.capacity()))
    filled, filler = Image(path), HostCopy(1)
    filler.fill(filled.install(plan))
    filler.close()
    filled.close()
    return path.read_bytes()


class Written:
    """One file of archives, written over from save to save."""

    def __init__(self, path: Path) -> None:
        self.path, self.planner = path, ShardPlanner()

    def save(self, items: Items) -> ShardPlan:
        shard = self.planner.plan(items)
        image(self.path, shard.plan)
        return shard

    def load(self, shard: ShardPlan) -> list[Any]:
        """As torch's FileSystemReader reads."""
        with self.path.open("rb") as file:
            views = (_create_file_view(file, *place) for place in shard.places)
            return [torch.load(io.BytesIO(view.read()), map_location="cpu", weights_only=True) for view in views]


@pytest.fixture
def file(tmp_path: Path) -> Written:
    return Written(tmp_path / "__0_0.distcp")


def archive(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


FLAT = torch.arange(1000, dtype=torch.float32)
TENSORS = {
    "plain": torch.randn(5, 7),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "view": FLAT[100:140].view(5, 8),
    "odd bytes": torch.arange(7, dtype=torch.uint8)[1:6],
    "columns": FLAT.view(10, 100)[:, 3:7],
    "transposed": torch.randn(3, 4).t(),
    "expanded": torch.tensor([1.0]).expand(4, 3),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "parameter": torch.nn.Parameter(torch.randn(3)),
    "float8": torch.randn(3).to(torch.float8_e4m3fn),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    "quantized": torch.quantize_per_tensor(torch.randn(4), 0.1, 10, torch.quint8),
    "sparse": torch.eye(3).to_sparse(),
}


def test_tensors_in_a_distcp_file_load_equal(file: Written) -> None:
    for name, tensor in TENSORS.items():
        around = [torch.tensor([1.0]), tensor, torch.tensor([2.0])]
        for got, want in zip(file.load(file.save(around)), around, strict=True):
            assert (got.dtype, got.shape, got.layout) == (want.dtype, want.shape, want.layout), name
            assert torch.equal(_values(got), _values(want)), name
            assert not got.requires_grad, name


def _values(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
    return tensor.detach().to(torch.complex64)


def test_a_view_is_saved_with_its_own_bytes_alone_and_an_unchanged_structure_is_planned_once(file: Written) -> None:
    shard = file.save([FLAT[100:140]])
    assert shard.places[0].length < 40 * 4 + 2000
    assert [storage.nbytes() for storage in shard.plan.storages] == [160]
    first = file.save([torch.zeros(3), archive("a"), torch.zeros(4)])
    second = file.save([torch.ones(3), archive("longer"), torch.ones(4)])
    assert second.plan.skeleton is first.plan.skeleton
    assert second.places == first.places
    one, text, other = file.load(second)
    assert (one.tolist(), text, other.tolist()) == ([1] * 3, "longer", [1] * 4)
    items: Items = [torch.zeros(3), archive("a")]
    others: list[Items] = [[torch.zeros(4), items[1]], [torch.zeros(3, dtype=torch.int32), items[1]], items[::-1]]
    for changed in (*others, [*items, torch.zeros(3)], items[:1], []):
        first, second = file.save(items), file.save(changed)
        assert second.plan.skeleton is not first.plan.skeleton
        assert len(file.load(second)) == len(changed)


def test_values_in_a_distcp_file_may_grow_and_shrink(file: Written) -> None:
    """torch looks for the end of an archive in steps, and misses one that is near the begin of a large room."""
    for length in (0, 1, GROWTH // 2, GROWTH - 1, GROWTH, *range(1000, 40_000, 2500), 70_000):
        file.planner = ShardPlanner()
        for value in ("", "x" * length, "small", "y" * (length // 3)):
            assert file.load(file.save([archive(value), torch.tensor([1.0])])) == [value, torch.tensor([1.0])], length


def test_bytes_that_are_no_archive_or_one_with_a_comment_keep_their_length(file: Written) -> None:
    commented = archive(1)[:-2] + b"\x02\x00hi"
    shard = file.save([b"raw\0\0", b"", archive(1), commented, torch.zeros(3), torch.zeros(5)])
    assert [shard.places[place].length for place in (0, 1, 3)] == [5, 0, len(commented)]
    assert file.path.read_bytes()[shard.places[0].offset :][:5] == b"raw\0\0"
    assert all(gap.offset % 64 == 0 for gap in shard.plan.skeleton.gaps), "bytes of a tensor begin at a multiple of 64"
    longer = file.save([b"raw bytes", b"", archive(1)])
    assert longer.places[0].length == 9
    assert file.load(file.save([commented])) == [1]


# --- files of safetensors, and of bytes as they are


def many() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {f"t{i}": torch.randint(0, 2, (i, 3)).to(dtype) for i, dtype in enumerate(DTYPES, 1)}
    whole = torch.arange(60.0).view(6, 10)
    return found | {
        "scalar": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
        "transposed": whole.t(),
        "row": whole[2],
        'näme "x"/y': torch.ones(1, dtype=torch.int8),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def test_a_safetensors_file_equals_what_the_library_writes_and_what_it_cannot_hold_is_named(tmp_path):
    tensors = many()
    theirs = {name: tensor.detach().resolve_conj().clone().contiguous() for name, tensor in tensors.items()}
    for metadata in ({}, {"format": "pt"}):
        ours = image(tmp_path / "ours", SafetensorsPlanner().plan(Tensors(tensors, metadata)))
        save_file(theirs, tmp_path / "theirs", metadata or None)
        assert ours == (tmp_path / "theirs").read_bytes()
        (tmp_path / "ours").unlink()
    for tensor in (torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.complex128)):
        with pytest.raises(NotLoadable, match=r"cannot hold 'layer\.weight', a .*(sparse|complex128)"):
            SafetensorsPlanner().plan(Tensors({"layer.weight": tensor}))


def test_files_of_plain_bytes_are_saved_unchanged_and_json_may_grow_within_its_room(tmp_path):
    planner = RawPlanner()
    first = planner.plan(Raw(b"\0binary\0"))
    assert image(tmp_path / "file", first) == b"\0binary\0"
    assert planner.plan(Raw(b"\0binary\0")).skeleton is first.skeleton
    longer = planner.plan(Raw(b"longer than that"))
    assert not longer.skeleton.fits(first.skeleton.capacity())
    assert image(tmp_path / "file", longer) == b"longer than that"
    with pytest.raises(NotLoadable, match="no bytes"):
        planner.plan(Raw(b""))
    planner = RawPlanner()
    capacity = planner.plan(Raw(b'{"step": 1}', may_end_with_spaces=True)).skeleton.capacity()
    later = planner.plan(Raw(b'{"step": 1, "history": [1, 2, 3]}', may_end_with_spaces=True))
    assert later.skeleton.fits(capacity)
    assert json.loads(image(tmp_path / "file", later, capacity)) == {"step": 1, "history": [1, 2, 3]}
    assert not planner.plan(Raw(b"[" + b"1," * 40000 + b"1]", may_end_with_spaces=True)).skeleton.fits(capacity)
