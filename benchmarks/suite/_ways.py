"""Ways to save the state of a job: fastckpt's, torch's, and those of peers, each at its best configuration.

python -m benchmarks.suite._ways NAME    # prints why a way cannot save here; nothing if it can
"""

import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.suite._states import tensors
from benchmarks.suite._training import Training

State = dict[str, Any]
Wait = Callable[[], object]
LIMIT = 120.0
"""Seconds that a save may take until it is durable."""


def nothing() -> None:
    """Wait for nothing."""


@dataclass(frozen=True)
class Saving:
    """A save that is under way.

    Attributes:
        durable: Returns once the way calls it saved on storage; None if it goes to memory alone.
        staged: Returns once training may change the state.
    """

    durable: Wait | None = None
    staged: Wait = nothing


class Way:
    """A way to save; constructed before the first step that counts."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.open()

    def open(self) -> None:
        """Make what is kept between saves."""

    def ready(self) -> None:
        """Have memory made before the first save, for those that can."""

    def save(self, step: int) -> Saving:
        """Begin a save; training goes on when this returns."""
        raise NotImplementedError

    def load(self, step: int) -> list[torch.Tensor]:
        """The tensors of what was saved last, in the order of the state's."""
        raise NotImplementedError

    def remove(self, step: int) -> None:
        """Delete what a step has left on storage."""
        for path in self.folder.glob(f"*{step:04}*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def close(self) -> None:
        """Give back what is kept between saves."""

    def path(self, step: int) -> Path:
        """Return the path of the file or folder of a step."""
        return self.folder / f"{step:04}"

    def blank(self) -> State:
        """A state of the same structure, with other values."""
        return blank(self.training.state())


def blank(node: Any) -> Any:
    """The same structure with tensors of -1."""
    if isinstance(node, torch.Tensor):
        return torch.full_like(node, -1)
    if isinstance(node, dict):
        return {key: blank(value) for key, value in node.items()}
    return [blank(value) for value in node] if isinstance(node, list | tuple) else node


def appears(path: Path, text: str) -> None:
    """Wait until a file has this text."""
    deadline = time.monotonic() + LIMIT
    while not path.exists() or path.read_text().strip() != text:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} does not say {text} after {LIMIT} s")
        time.sleep(0.005)


class Fastckpt(Way):
    """DdpCheckpointer, memory prepared before the first save."""

    overlaps = False
    place = "MEMORY"

    def open(self) -> None:
        from fastckpt import DdpCheckpointer, StorageType

        overlap = self.training.optimizer if self.overlaps else None
        self._checkpointer = DdpCheckpointer(self.folder, overlap=overlap)
        self._types = StorageType

    def ready(self) -> None:
        self._checkpointer.prepare(self.training.state())

    def save(self, step: int) -> Saving:
        place = self._types[self.place]
        result = self._checkpointer.save_checkpoint(step, self.training.state(), storage_type=place)
        if not result:
            raise RuntimeError(result.reason)
        tracker = self.folder / "latest_checkpointed_iteration.txt"
        return Saving((lambda: appears(tracker, str(step))) if self.place == "DISK" else None)

    def load(self, step: int) -> list[torch.Tensor]:
        if self.place == "MEMORY":
            return tensors(self._checkpointer.load_checkpoint())
        return tensors(torch.load(self.folder / f"checkpoint-{step}/model.pt"))

    def remove(self, step: int) -> None:
        shutil.rmtree(self.folder / f"checkpoint-{step}", ignore_errors=True)

    def close(self) -> None:
        self._checkpointer.close()


class FastckptDisk(Fastckpt):
    """The same, to memory and then to storage."""

    place = "DISK"


class FastckptOverlapped(Fastckpt):
    """Saves to memory, overlapped with the next forward and backward."""

    overlaps = True


class FastckptDiskOverlapped(FastckptDisk):
    """Saves to memory and then to storage, overlapped with the next forward and backward."""

    overlaps = True


class TorchSave(Way):
    """torch.save to a new file."""

    def save(self, step: int) -> Saving:
        torch.save(self.training.state(), self.path(step))
        return Saving(nothing)

    def load(self, step: int) -> list[torch.Tensor]:
        return tensors(torch.load(self.path(step)))


class TorchSaveWithoutCrc(TorchSave):
    """The same without CRC-32, which torch.load does not check."""

    def open(self) -> None:
        torch.serialization.set_crc32_options(False)


class Safetensors(Way):
    """save_file of a flat dict, by number: the format has no nested ones."""

    def save(self, step: int) -> Saving:
        from safetensors.torch import save_file

        save_file({f"{i:05}": each for i, each in enumerate(tensors(self.training.state()))}, self.path(step))
        return Saving(nothing)

    def load(self, step: int) -> list[torch.Tensor]:
        from safetensors.torch import load_file

        found = load_file(self.path(step))
        return [found[key] for key in sorted(found)]


class Dcp(Way):
    """dcp.save with plans cached from save to save."""

    def open(self) -> None:
        dist.init_process_group("gloo")

    def save(self, step: int) -> Saving:
        dcp.save(self.training.state(), checkpoint_id=self.path(step), planner=self.planner())
        return Saving(nothing)

    def planner(self) -> dcp.DefaultSavePlanner:
        """One that uses the plans of the save before."""
        return dcp.DefaultSavePlanner(enable_plan_caching=True)

    def load(self, step: int) -> list[torch.Tensor]:
        state = self.blank()
        dcp.load(state, checkpoint_id=self.path(step))
        return tensors(state)

    def close(self) -> None:
        dist.destroy_process_group()


class DcpAsync(Dcp):
    """dcp.async_save as its documentation shows it: a thread, staged again in each save."""

    process = shared = kept = overlaps = False

    def open(self) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().open()
        pinned = torch.accelerator.is_available()
        options = StagingOptions(pinned, self.shared, self.overlaps, pinned)
        self._stager = DefaultStager(options) if self.kept else None

    def save(self, step: int) -> Saving:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

        response = dcp.async_save(
            self.training.state(),
            checkpoint_id=self.path(step),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if self.process else AsyncCheckpointerType.THREAD,
            async_stager=self._stager,
            planner=self.planner(),
        )
        if isinstance(response, AsyncSaveResponse):
            return Saving(response.upload_completion.result, response.staging_completion.result)
        return Saving(response.result)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
        super().close()


class DcpAsyncCached(DcpAsync):
    """A thread; the stager, and with it its memory, is kept."""

    kept = True


class DcpAsyncProcess(DcpAsync):
    """A process; the stager is kept, its memory is shared with that process."""

    process = kept = shared = True


class DcpAsyncOverlapped(DcpAsyncProcess):
    """The same, staged during the next forward and backward."""

    overlaps = True


class Torchsnapshot(Way):
    """Snapshot.async_take; without batching it is faster, but what it writes is torn by the optimizer's next step."""

    def save(self, step: int) -> Saving:
        from torchsnapshot import Snapshot, StateDict

        app = {"state": StateDict(**self.training.state())}
        return Saving(Snapshot.async_take(str(self.path(step)), app).wait)

    def load(self, step: int) -> list[torch.Tensor]:
        from torchsnapshot import Snapshot, StateDict

        app = {"state": StateDict(**self.blank())}
        Snapshot(str(self.path(step))).restore(app)
        return tensors(app["state"].state_dict())


class DLRover(Way):
    """Flash Checkpoint of DLRover under its dlrover-run."""

    place = "MEMORY"

    def open(self) -> None:
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        dist.init_process_group("gloo")
        self._checkpointer = DdpCheckpointer(str(self.folder))
        self._type = StorageType[self.place]

    def save(self, step: int) -> Saving:
        self._checkpointer.save_checkpoint(step, self.training.state(), storage_type=self._type)
        tracker = self.folder / "dlrover_latest.txt"
        return Saving((lambda: appears(tracker, str(step))) if self.place == "DISK" else None)

    def load(self, step: int) -> list[torch.Tensor]:
        if self.place == "MEMORY":
            return tensors(self._checkpointer.load_checkpoint())
        return tensors(torch.load(self.folder / f"{step}/rank_0.pt"))

    def remove(self, step: int) -> None:
        shutil.rmtree(self.folder / str(step), ignore_errors=True)

    def close(self) -> None:
        dist.destroy_process_group()


class DLRoverDisk(DLRover):
    """The same, to memory and then to storage."""

    place = "DISK"


class NvrxAsync(Way):
    """TorchAsyncCheckpoint with its persistent process."""

    def open(self) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._saver = TorchAsyncCheckpoint(persistent_queue=True)

    def save(self, step: int) -> Saving:
        self._saver.async_save(self.training.state(), self.path(step))
        return Saving(lambda: self._saver.finalize_async_save(blocking=True))

    def load(self, step: int) -> list[torch.Tensor]:
        return tensors(torch.load(self.path(step)))

    def close(self) -> None:
        self._saver.finalize_async_save(terminate=True)
        dist.destroy_process_group()


class NvrxLocal(Way):
    """LocalCheckpointManager, without replication."""

    def open(self) -> None:
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._manager = LocalCheckpointManager(self.folder)

    def save(self, step: int) -> Saving:
        from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict

        self._manager.save(BasicTensorAwareStateDict(self.training.state()), step, is_async=False)
        return Saving(nothing)

    def load(self, step: int) -> list[torch.Tensor]:
        found, _ = self._manager.load()
        return list(found.tensors)


class Orbax(Way):
    """save_async of NumPy's views of the tensors, since Orbax knows those of JAX and NumPy only."""

    def open(self) -> None:
        from orbax.checkpoint.experimental import v1

        self._context = v1.Context()
        saving = self._context.array.saving
        saving.use_ocdbt, saving.use_zarr3, saving.use_compression = True, True, False

    def save(self, step: int) -> Saving:
        from orbax.checkpoint.experimental import v1

        views = {f"{i:05}": each.detach().numpy() for i, each in enumerate(tensors(self.training.state()))}
        with self._context:
            return Saving(v1.save_async(self.path(step), views).result)

    def load(self, step: int) -> list[torch.Tensor]:
        from orbax.checkpoint.experimental import v1

        with self._context:
            found = v1.load(self.path(step))
        return [torch.from_numpy(found[key]) for key in sorted(found)]


WAYS: dict[str, type[Way]] = {
    "fastckpt MEMORY, overlapped": FastckptOverlapped,
    "fastckpt MEMORY": Fastckpt,
    "fastckpt DISK, overlapped": FastckptDiskOverlapped,
    "fastckpt DISK": FastckptDisk,
    "torch.save": TorchSave,
    "torch.save, no CRC-32": TorchSaveWithoutCrc,
    "safetensors": Safetensors,
    "dcp.save": Dcp,
    "dcp.async_save, thread": DcpAsync,
    "dcp.async_save, thread, cached staging": DcpAsyncCached,
    "dcp.async_save, process, shared-memory staging": DcpAsyncProcess,
    "dcp.async_save, process, overlapped staging": DcpAsyncOverlapped,
    "torchsnapshot": Torchsnapshot,
    "DLRover MEMORY": DLRover,
    "DLRover DISK": DLRoverDisk,
    "nvidia-resiliency-ext, async": NvrxAsync,
    "nvidia-resiliency-ext, local": NvrxLocal,
    "Orbax": Orbax,
}


def reason_against(name: str) -> str:
    """Return the exception of a way that was to save a tiny state, and its place; "" if it saved it."""
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        try:
            way = WAYS[name](Training(0.001), Path(folder))
            saving = way.save(0)
            if saving.durable is not None:
                saving.durable()
        except Exception as error:  # noqa: BLE001  # any is the answer
            frame = traceback.extract_tb(error.__traceback__)[-1]
            calls = [each for each in traceback.extract_tb(error.__traceback__) if "nvidia_resiliency" in each.filename]
            frame = calls[-1] if calls else frame
            text = str(error).splitlines()[0] if str(error) else ""
            return f"`{frame.line}` in {Path(frame.filename).name} raises {type(error).__name__}: {text}".rstrip(": ")
    return ""


if __name__ == "__main__":
    print(reason_against(sys.argv[1]), flush=True)
    os._exit(0)  # threads and processes of a peer that failed half way would wait for ever
