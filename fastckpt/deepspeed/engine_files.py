"""The files that a DeepSpeed engine would write, and those that it reads, through its own checkpoint engine."""

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule

from fastckpt._core.format.views import bytes_of, side_by_side
from fastckpt._core.resume.load import load_copy
from fastckpt.deepspeed._private import expert_files, model_files, partition_files
from fastckpt.errors import ConfigError

ON_CPU = ("cpu", torch.device("cpu"))


def files_of(
    engine: DeepSpeedEngine,
    scratch: Path,
    tag: str,
    client_state: Mapping[str, Any],
    *,
    exclude_frozen_parameters: bool = False,
) -> dict[str, Any]:
    """Files that ``engine.save_checkpoint`` would write on this rank: states by names in the tag's directory.

    All ranks call it. States refer to the engine's tensors: save them before these change. No ``latest`` is written.

    Args:
        scratch: Directory for scripts that DeepSpeed puts next to checkpoints.
        tag: Name of the checkpoint, without a slash.

    Raises:
        ConfigError: The engine copies a part of its state in files.
    """
    check(engine)
    collector = _Collector(engine.checkpoint_engine, scratch / tag, has_experts=engine.has_moe_layers)
    with _in_place_of_its_own(engine, collector):
        engine.save_checkpoint(
            str(scratch),
            tag=tag,
            client_state=dict(client_state),
            # `latest` must name a durable checkpoint: the agent writes it, after the publication.
            save_latest=False,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
    return collector.files


@contextmanager
def loading(engine: DeepSpeedEngine, threads: int) -> Iterator[None]:
    """Have ``engine.load_checkpoint`` read with ``threads`` threads into its own memory, within this context."""
    with _in_place_of_its_own(engine, _Loader(engine.checkpoint_engine, threads)):
        yield


def check(engine: DeepSpeedEngine) -> None:
    """Raise ConfigError for an engine that does not give all of its state to its checkpoint engine."""
    if engine.zero_nvme_offload_optimizer():
        raise ConfigError(
            "offload_optimizer.device is nvme: DeepSpeed copies that state from file to file itself, past shared "
            "memory. Use device cpu, or DeepSpeed's own save_checkpoint."
        )
    if engine.use_node_local_storage():
        raise ConfigError(
            "checkpoint.use_node_local_storage is true: each node would have a checkpoint of its own. Set it to false: "
            "shared memory is local, and what is persisted is one checkpoint of all nodes."
        )


def reads(engine: DeepSpeedEngine) -> tuple[str, ...]:
    """Names of files that this rank reads of a checkpoint of as many ranks."""
    names = model_files(engine)
    if engine.zero_optimization():
        names += partition_files(engine)
    if engine.has_moe_layers:
        names += expert_files(engine)
    if isinstance(engine.module, PipelineModule):
        layers = enumerate(engine.module.forward_funcs)
        names += [engine.module.ckpt_layer_path("", i) for i, layer in layers if hasattr(layer, "load_state_dict")]
    return tuple(Path(name).name for name in names)


class _Collector(CheckpointEngine):  # type: ignore[misc]
    """Takes states instead of writing them.

    That it is decoupled keeps DeepSpeed from writing ``latest``, which has to wait until all is durable. That it does
    not preserve the sharing of storages keeps DeepSpeed from copying layers, so as not to save with each of them the
    flat buffer that holds it.
    """

    def __init__(self, own: CheckpointEngine, root: Path, *, has_experts: bool = False) -> None:
        super().__init__()
        self.files: dict[str, Any] = {}
        self._own = own
        self._root = root
        self._has_experts = has_experts

    def create(self, info: Any) -> None:
        """Do nothing: all files that follow are of this save."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: directories come with the files that are persisted."""

    def save(self, state_dict: Any, path: str) -> None:
        """Take the state of a file."""
        name = Path(path).relative_to(self._root).as_posix()
        is_partition = "zero_pp_rank" in name and name.endswith("_optim_states.pt")
        would_be_copied = name.startswith("layer_") or (self._has_experts and not is_partition)
        self.files[name] = _apart(state_dict) if would_be_copied else state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        """Same as DeepSpeed's own."""
        return self._own.load(path, map_location)

    def commit(self, info: Any) -> bool:
        """Do nothing: the caller that saves commits."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Same as DeepSpeed's own."""
        return bool(self._own.is_data_parallel_writer(dp_rank))

    def is_decoupled(self) -> bool:
        """Yes, see above."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """Return False, see above."""
        return False


class _Loader(_Collector):
    """Reads files that another process may write to next, so that nothing of them is kept mapped."""

    def __init__(self, own: CheckpointEngine, threads: int) -> None:
        super().__init__(own, Path())
        self._threads = threads

    def load(self, path: str, map_location: Any = None) -> Any:
        """Same as DeepSpeed's own, for about the price of one copy."""
        to_cpu = map_location in ON_CPU or callable(map_location)  # DeepSpeed's functions leave storages where they are
        # load_copy reads torch's zip archives only; older files are left to torch.
        if to_cpu and zipfile.is_zipfile(path):
            return load_copy(Path(path), self._threads, weights_only=False)
        return torch.load(path, map_location=map_location, weights_only=False)


def _apart(item: Any) -> Any:
    """A state of tensors with storages of no more than themselves, on the CPU, as DeepSpeed's copies."""
    if isinstance(item, torch.Tensor):
        tensor = side_by_side(item.detach().cpu())
        return item if tensor is None else tensor.new_empty(0).set_(bytes_of(tensor), 0, tensor.shape, tensor.stride())
    if isinstance(item, dict):
        return type(item)({key: _apart(value) for key, value in item.items()})
    return type(item)(map(_apart, item)) if type(item) in (list, tuple) else item


@contextmanager
def _in_place_of_its_own(engine: DeepSpeedEngine, ours: CheckpointEngine) -> Iterator[None]:
    """Restore DeepSpeed's own checkpoint engine for saves without us, also between ours."""
    own, engine.checkpoint_engine = engine.checkpoint_engine, ours
    try:
        yield
    finally:
        engine.checkpoint_engine = own
