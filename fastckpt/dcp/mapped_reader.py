"""Reads tensors out of mapped files, if the archives around them are those that we write."""

import mmap
import os
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fastckpt._core.format.distcp import Headers, Layout
from fastckpt._core.format.structure import QUANTIZED
from fastckpt._core.io.regular_file import open_regular
from fastckpt._core.torch_private.sharding import narrow_tensor_by_index


class MappedReader(FileSystemReader):
    """Reads a directory of DCP as its base does, in less than half the time: each tensor is copied once.

    Tensors that are not laid out as torch.save's plain contiguous ones, or not aligned, are left to the base.
    """

    _headers = Headers()
    _layouts: dict[MetadataIndex, Layout]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Note where each tensor is stored."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._layouts = {
            MetadataIndex(name, chunk.offsets): (entry.properties.dtype, chunk.sizes)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of the plan into the caller's tensors."""
        files: dict[str, mmap.mmap] = {}
        rest = [item for item in plan.items if not self._copy(item, planner, files)]
        return super().read_data(LoadPlan(rest, plan.storage_data, plan.planner_data), planner)

    def _copy(self, item: ReadItem, planner: LoadPlanner, files: dict[str, mmap.mmap]) -> bool:
        if item.type is LoadItemType.BYTE_IO or (source := self._tensor(item.storage_index, files)) is None:
            return False
        part = narrow_tensor_by_index(source, item.storage_offsets, item.lengths)
        # detach: copy_ into a parameter that requires gradients would be recorded by autograd, or refused.
        target = planner.resolve_tensor(item).detach()
        if target.size() != part.size():
            return False  # the base class raises the error
        target.copy_(part)
        planner.commit_tensor(item, target)
        return True

    def _tensor(self, index: MetadataIndex, files: dict[str, mmap.mmap]) -> torch.Tensor | None:
        """A tensor of which the bytes are those in the file; None if that is not certain."""
        place, layout = self.storage_data[index], self._layouts.get(index)
        if layout is None or layout[0] in QUANTIZED or place.transform_descriptors:
            return None
        header = self._headers.of(layout)
        if place.length != header.length:
            return None
        file = files.get(place.relative_path) or _mapped(Path(self.path, place.relative_path))
        files[place.relative_path] = file
        for offset, data in header.segments:
            start = place.offset + offset
            # The archive around the tensor is compared byte by byte:
            # only then is its data known to be raw and at this offset.
            if file[start : start + len(data)] != data:
                return None
        (dtype, shape), start = layout, place.offset + header.gaps[0].offset
        # frombuffer needs aligned addresses, and refuses empty ones.
        if start % dtype.itemsize or not shape.numel():
            return None
        return torch.frombuffer(file, dtype=dtype, count=shape.numel(), offset=start).view(shape)


def _mapped(path: Path) -> mmap.mmap:
    with os.fdopen(open_regular(path, follow=True), "rb") as file:
        # Copy on write: torch warns of buffers that are not writable, and nothing here writes to them.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
