"""Files of safetensors, and of bytes as they are: what the library writes, byte for byte."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastckpt._core.format.raw import Raw, RawPlanner
from fastckpt._core.format.safetensors import DTYPES, SafetensorsPlanner, Tensors
from fastckpt._core.transfer.host_copy import HostCopy
from fastckpt._core.transfer.image import Image
from fastckpt.errors import NotLoadable


def image(path: Path, plan, capacity: int | None = None) -> bytes:
    """What a save by this plan makes of a file."""
    path.write_bytes(b"\xff" * (capacity or plan.skeleton.capacity()))
    filled, filler = Image(path), HostCopy(1)
    filler.fill(filled.install(plan))
    filler.close()
    filled.close()
    return path.read_bytes()


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


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}])
def test_a_safetensors_file_equals_what_the_library_writes(tmp_path, metadata):
    tensors = many()
    ours = image(tmp_path / "ours", SafetensorsPlanner().plan(Tensors(tensors, metadata)))
    theirs = {name: tensor.detach().resolve_conj().clone().contiguous() for name, tensor in tensors.items()}
    save_file(theirs, tmp_path / "theirs", metadata or None)
    assert ours == (tmp_path / "theirs").read_bytes()
    loaded = load_file(tmp_path / "ours")
    assert all(
        torch.equal(loaded[name].view(-1).to(torch.complex128), tensor.reshape(-1).to(torch.complex128))
        for name, tensor in theirs.items()
        if tensor.dtype.itemsize > 1
    )


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.complex128)])
def test_values_that_safetensors_cannot_hold_are_named(tensor):
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
