"""The circumstances of a job: a profile is valid only under equal ones."""

from collections.abc import Iterable

import torch

from fastckpt._core.policy.frequency.profile_cache import ProfileKey
from fastckpt._core.storage.store import is_url
from fastckpt._core.version import VERSION


def circumstances(
    model: torch.nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    directory: str,
    *,
    size: int,
    world_size: int,
    overlaps: bool = True,
) -> ProfileKey:
    """The circumstances of a job that saves to a directory.

    Args:
        model: The module.
        optimizers: Its optimizers.
        directory: A path, or a URL.
        size: Bytes of the model, alike on all ranks.
        world_size: Their number.
        overlaps: True if tensors that only optimizers change are copied in the background.
    """
    device = device_of(model)
    names = ", ".join(type(each).__name__ for each in optimizers)
    return ProfileKey(
        size,
        world_size,
        directory.partition("://")[0] if is_url(directory) else "directory",
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        {"fastckpt": VERSION, "torch": torch.__version__},
        names if overlaps or not names else f"{names}, without overlap",
    )


def size_of(model: torch.nn.Module) -> int:
    """Bytes of its parameters and buffers, by their shapes: of FSDP1 those of this rank, of DTensors all."""
    return sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of a model; the processor, if it has no tensors."""
    return next((each.device for each in (*model.parameters(), *model.buffers())), torch.device("cpu"))
