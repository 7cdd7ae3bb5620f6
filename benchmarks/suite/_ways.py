"""Ways to save the state of a job: fastckpt's, torch's, and those of peers, each at its best configuration.

python -m benchmarks.suite._ways NAME    # prints why a way cannot save here; nothing if it can
"""

import os
import shutil
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.suite._peer_ways import DLRover, DLRoverDisk, NvrxAsync, NvrxLocal, Orbax, Torchsnapshot
from benchmarks.suite._states import tensors
from benchmarks.suite._training import Training
from benchmarks.suite._way import Saving, Way, appears, nothing


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
        if not dist.is_initialized():
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
        self._group = dist.new_group(backend="gloo")  # its collectives must not mix with those of training
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
            process_group=self._group,
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
