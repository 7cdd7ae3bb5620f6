"""The checkpoint directory of a Trainer: also shards, as torch.distributed.checkpoint (DCP) lays them out."""

from collections.abc import Mapping
from itertools import count
from typing import Any

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import OF_NODE
from fastckpt._core.format.plan import Plan
from fastckpt._core.metrics import phase
from fastckpt._core.native.folder_checkpointer import FolderCheckpointer
from fastckpt.dcp.plan_messages import plan_mailbox
from fastckpt.dcp.shard_plans import ShardPlans, Unplanned

__all__ = ["TrainerFolder", "Unplanned"]

_NUMBERS = count()


class TrainerFolder(FolderCheckpointer):
    """Saves the files of a Trainer, and finds them again."""

    _shards: dict[str, ShardPlans] | None = None
    _last: SaveId | None = None

    @property
    def has_other_nodes(self) -> bool:
        """True if ranks of this job run on several nodes."""
        return self._writer.place.group_world_size > 1

    def newest_durable(self) -> int | None:
        """The step of the newest durable checkpoint; None if there is none, or that is unknown."""
        self._writer.be_ready()
        status = self._writer.glance()
        return status.newest[1] if status is not None and status.newest else None

    def shard_files(self, step: int, states: Mapping[str, dict[str, Any]], *, together: bool) -> dict[str, Plan]:
        """This rank's files of sharded states, each of which is a directory of DCP.

        Args:
            step: The step that is saved.
            states: By the names of the directories, the same in each save: state dicts for ``dcp.save``.
            together: Whether all ranks wait for each other, so that a change of structure costs no save.

        Raises:
            Unplanned: The save is to be skipped, with the reason.
            ConfigError: The states of the ranks do not go together.
        """
        writer = self._writer
        writer.be_ready()
        # Made at the first save: before that there may be no process group.
        if self._shards is None:
            plans = [plan_mailbox(writer.place.world_size, f"plans of trainer {next(_NUMBERS)}") for _ in states]
            self._shards = {
                name: ShardPlans(writer.place, plan, writer.stall) for name, plan in zip(states, plans, strict=True)
            }
        save, files = writer.save_id(step), dict[str, Plan]()
        with phase("snapshot.shards", step=step):
            for folder, state in states.items():
                found = self._shards[folder].files(save, state, together=together)
                # copies for the other ranks of a node are for our reader, and Trainer has its own
                files |= {f"{folder}/{name}": plan for name, plan in found.items() if not name.startswith(OF_NODE)}
        self._last = save
        return files

    def close(self) -> None:
        """Same as `FolderCheckpointer.close`."""
        try:
            super().close()  # first: the saver, when the other ranks ask it, knows who has closed
        finally:
            for shards in (self._shards or {}).values():
                shards.close(self._last)
