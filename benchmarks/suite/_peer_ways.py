"""Ways of peers to save the state of a job, each at its best configuration."""

import shutil

import torch
import torch.distributed as dist

from benchmarks.suite._states import tensors
from benchmarks.suite._way import Saving, Way, appears, nothing


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
