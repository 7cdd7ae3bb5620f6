"""Files of archives: torch reads them like FileSystemWriter's, at offsets that stay from save to save."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.utils import _create_file_view

from fastckpt._core.format.distcp import GROWTH, ShardPlan, ShardPlanner
from fastckpt._core.transfer.host_copy import HostCopy
from fastckpt._core.transfer.image import Image

Items = Sequence[torch.Tensor | bytes]


class Written:
    """One file, written over from save to save."""

    def __init__(self, path: Path) -> None:
        self.path, self.planner = path, ShardPlanner()

    def save(self, items: Items) -> ShardPlan:
        shard = self.planner.plan(items)
        size = self.path.stat().st_size if self.path.exists() else 0
        if not shard.plan.skeleton.fits(size):
            self.path.unlink(missing_ok=True)
            self.path.write_bytes(b"\xa5" * shard.plan.skeleton.capacity())
        image, filler = Image(self.path), HostCopy(1)
        filler.fill(image.install(shard.plan))
        image.close()
        filler.close()
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
