"""The ways to save of benchmarks/fsdp_save.py: bare limits, ours, and each that torch 2.13 has.

A way's ``save`` returns when training may go on; what it returns is to be called when a step of the optimizer is next,
and then until the checkpoint is durable.
"""

import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.tensor import DTensor

from fastckpt.dcp import SharedMemoryStager, SharedMemoryWriter
from fastckpt.fsdp import FsdpShardCheckpointer, StorageType

BLOCK = 32 << 20
PAGE = 4096
State = dict[str, Any]
Wait = Callable[[], object]


def nothing() -> None:
    """Wait for nothing."""


@dataclass(frozen=True)
class Saving:
    """A save that is under way.

    Attributes:
        durable: Returns once the checkpoint is; None if it goes to memory alone.
        staged: Returns once training may change the state.
    """

    durable: Wait | None = None
    staged: Wait = nothing


@dataclass(frozen=True)
class Way:
    """A way to save.

    Attributes:
        name: Its name in the tables.
        save: Saves a step.
        load: Loads what was saved last into a state; None for what is no checkpoint.
        ready: Preparation, which does not count.
        remove: Deletes what a step has left on storage, by one rank.
        waits: True if the optimizer waits until the state is copied.
    """

    name: str
    save: Callable[[int], Saving]
    load: Callable[[int, State], object] | None = None
    ready: Wait = nothing
    remove: Callable[[int], object] = lambda step: None
    waits: bool = True


def tensors(node: Any) -> Iterator[torch.Tensor]:
    """Yield this rank's part of the tensors of a state."""
    if isinstance(node, DTensor):
        yield node.to_local()
    elif isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, dict | list | tuple):
        for child in node.values() if isinstance(node, dict) else node:
            yield from tensors(child)


class WarmCopy:
    """A loop of `Tensor.copy_` into shared memory that was faulted in: the limit of a save to memory, and of a load."""

    def __init__(self, state: State, threads: int) -> None:
        self._threads = threads
        sizes = [tensor.nbytes for tensor in tensors(state)]
        fd = os.memfd_create("fastckpt-bench")
        os.ftruncate(fd, max(1, sum(sizes)))
        memory = mmap.mmap(fd, max(1, sum(sizes)), mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(fd)
        self._parts = torch.frombuffer(memory, dtype=torch.uint8).split(sizes)
        self.aim(state)

    def aim(self, state: State) -> None:
        """Copy of, and into, the tensors of this state from now on."""
        sources = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors(state)]
        self._copies = list(zip(self._parts, sources, strict=True))

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        for target, source in pairs:
            target.copy_(source)
        torch.set_num_threads(threads)

    def save(self, step: int) -> Saving:
        self._copy(self._copies)
        return Saving()

    def load(self) -> None:
        self._copy([(source, target) for target, source in self._copies])


class BareFile:
    """This rank's file in shared memory and storage, and nothing else: the limit of what is durable."""

    def __init__(self, shm: Path, folder: Path, rank: int) -> None:
        self._shm, self._path, self._name = shm, folder / f"bare.{rank}", f"__{rank}_0.distcp"
        self._memory = mmap.mmap(-1, PAGE)

    def ready(self) -> None:
        """Map an image of a save before."""
        source = os.open(next(self._shm.glob(f"*/slot-*/{self._name}")), os.O_RDONLY)
        self._memory = mmap.mmap(source, 0, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
        os.close(source)

    def save(self, step: int) -> Saving:
        """Write it from its mapping with O_DIRECT, then fdatasync."""
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        with memoryview(self._memory) as memory:
            for offset in range(0, len(memory), BLOCK):
                with memory[offset : offset + BLOCK] as block:
                    os.pwrite(fd, block, offset)
        os.fdatasync(fd)
        os.close(fd)
        return Saving(nothing)

    def read(self) -> None:
        """Read it with O_DIRECT into a buffer that is used again and again."""
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, BLOCK) as buffer:
            while os.readv(fd, [buffer]):
                pass
        os.close(fd)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def ours(checkpointer: FsdpShardCheckpointer, state: State, training: tuple[Any, Any], folder: Path) -> list[Way]:
    """Saves of `FsdpShardCheckpointer`, in both forms, to memory and storage."""
    model, optimizer = training
    wait = checkpointer.wait_latest_checkpoint

    def save(step: int, place: StorageType, *, form: str) -> Saving:
        what: Any = {"state_dict": state} if form == "state dict" else {"model": model, "optimizer": optimizer}
        result = checkpointer.save_checkpoint(step, storage_type=place, **what)
        if not result:
            raise RuntimeError(result.reason)
        return Saving(wait if place is StorageType.DISK else None)

    def load(step: int, into: State) -> None:
        reader = checkpointer.get_storage_reader()
        assert reader is not None
        dcp.load(into, storage_reader=reader)
        assert checkpointer.loaded_step == step

    return [
        Way(
            f"ours, {place.name}, {form}",
            lambda step, place=place, form=form: save(step, place, form=form),  # type: ignore[misc]
            load,
            remove=lambda step: shutil.rmtree(folder / f"checkpoint-{step}", ignore_errors=True),
        )
        for place in StorageType
        for form in ("state dict", "model")
    ]


def our_writer(writer: SharedMemoryWriter, state: State, folder: Path) -> list[Way]:
    """``dcp.save`` with our storage writer, and ``dcp.async_save`` with our stager, too; plans are cached."""
    planner, stager = planner_of("our writer", cached=True), SharedMemoryStager(writer)
    group = dist.new_group(backend="gloo")

    def save(step: int, place: StorageType) -> Saving:
        writer.storage_type = place
        dcp.save(state, checkpoint_id=folder / f"checkpoint-{step}", storage_writer=writer, planner=planner())
        if writer.result is not None and not writer.result:
            raise RuntimeError(writer.result.reason)
        return Saving(writer.wait if place is StorageType.DISK else None)

    def async_save(step: int) -> Saving:
        writer.storage_type = StorageType.DISK
        future = dcp.async_save(
            state,
            checkpoint_id=folder / f"checkpoint-{step}",
            storage_writer=writer,
            planner=planner(),
            process_group=group,
            async_stager=stager,
        )
        return Saving(lambda: (future.result(), writer.wait()))

    def remove(step: int) -> None:
        shutil.rmtree(folder / f"checkpoint-{step}", ignore_errors=True)

    return [
        *(
            Way(f"dcp.save, our writer, {place.name}, cached plans", partial(save, place=place), remove=remove)
            for place in StorageType
        ),
        Way("async_save, our writer and stager, DISK, cached plans", async_save, remove=remove),
    ]


class Stock:
    """Saves with torch's own means: files of DCP in a folder, written by the caller, a thread or a process."""

    def __init__(self, state: State, folder: Path) -> None:
        self._state, self._folder = state, folder
        self._group = dist.new_group(backend="gloo")  # saves that overlap must not mix with training's collectives
        self._stagers: list[DefaultStager] = []

    def _place(self, step: int) -> Path:
        return self._folder / f"{step}"

    def _way(self, name: str, save: Callable[[int], Saving]) -> Way:
        def load(step: int, into: State) -> None:
            dcp.load(into, checkpoint_id=self._place(step))

        return Way(name, save, load, remove=lambda step: shutil.rmtree(self._place(step), ignore_errors=True))

    def save(self, name: str, *, cached: bool = False) -> Way:
        """``dcp.save``."""
        planner = planner_of(name, cached=cached)

        def save(step: int) -> Saving:
            dcp.save(self._state, checkpoint_id=self._place(step), planner=planner())
            return Saving(nothing)

        return self._way(name, save)

    def torch_save(self) -> Way:
        """``torch.save`` and fsync of what each rank has: no checkpoint that another number of ranks could load."""

        def save(step: int) -> Saving:
            self._place(step).mkdir(exist_ok=True)
            with (self._place(step) / f"{dist.get_rank()}.pt").open("wb") as file:
                torch.save([tensor.detach() for tensor in tensors(self._state)], file)
                file.flush()
                os.fsync(file.fileno())
            return Saving(nothing)

        def load(step: int, into: State) -> None:
            loaded = torch.load(self._place(step) / f"{dist.get_rank()}.pt", mmap=True)
            with torch.no_grad():
                for target, source in zip(tensors(into), loaded, strict=True):
                    target.copy_(source)

        return Way("torch.save of each rank, fsync", save, load, remove=self._way("", save).remove)

    def stager(self, *, shared: bool, behind: bool = False) -> DefaultStager:
        """A stager to be used again and again; what of its options needs an accelerator is off."""
        pinned = non_blocking = torch.accelerator.is_available()
        self._stagers.append(DefaultStager(StagingOptions(pinned, shared, behind, non_blocking)))
        return self._stagers[-1]

    def async_save(
        self,
        name: str,
        kind: AsyncCheckpointerType,
        stager: DefaultStager | None = None,
        *,
        cached: bool = False,
        waits: bool = True,
    ) -> Way:
        """``dcp.async_save``; if staging overlaps with training, the optimizer ``waits`` for it."""
        planner = planner_of(name, cached=cached)

        def save(step: int) -> Saving:
            response = dcp.async_save(
                self._state,
                checkpoint_id=self._place(step),
                async_checkpointer_type=kind,
                async_stager=stager,
                planner=planner(),
                process_group=self._group,
            )
            if isinstance(response, AsyncSaveResponse):
                staged = response.staging_completion.result if waits else nothing
                return Saving(response.upload_completion.result, staged)
            return Saving(response.result)

        return replace(self._way(name, save), waits=waits)

    def close(self) -> None:
        """Give staging memory back."""
        for stager in self._stagers:
            stager.close()


def planner_of(name: str, *, cached: bool) -> Callable[[], DefaultSavePlanner]:
    """Makes planners for one way to save."""

    def make() -> DefaultSavePlanner:
        planner = DefaultSavePlanner(enable_plan_caching=cached)
        planner._cached_plans_key = name  # else all ways of a process have one cache, whatever their storage
        return planner

    return make


def forget(paths: list[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
