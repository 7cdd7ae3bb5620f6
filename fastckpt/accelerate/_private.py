"""Private names of accelerate; tried with accelerate 1.15.0."""

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator


def models(accelerator: Accelerator) -> list[Any]:
    """The models that were prepared."""
    return list(accelerator._models)


def optimizers(accelerator: Accelerator) -> list[Any]:
    """The optimizers that were prepared, each in accelerate's wrapper."""
    return list(accelerator._optimizers)


def schedulers(accelerator: Accelerator) -> list[Any]:
    """The schedulers that were prepared."""
    return list(accelerator._schedulers)


def dataloaders(accelerator: Accelerator) -> list[Any]:
    """The data loaders that were prepared."""
    return list(accelerator._dataloaders)


def custom_objects(accelerator: Accelerator) -> list[Any]:
    """Objects that were registered for checkpointing."""
    return list(accelerator._custom_objects)


def broadcasts_buffers(accelerator: Accelerator) -> bool:
    """Return whether DistributedDataParallel makes buffers equal before each forward; it is not among the models."""
    return accelerator.ddp_handler is None or bool(accelerator.ddp_handler.broadcast_buffers)


def save_hooks(accelerator: Accelerator) -> list[Callable[..., Any]]:
    """The hooks of ``register_save_state_pre_hook``."""
    return list(accelerator._save_model_state_pre_hook.values())


def count_skipped_epochs(accelerator: Accelerator) -> None:
    """Have a loader count the epoch that the rest of it from ``skip_first_batches`` ends; only that one counts it else.

    The next epoch would have the order of this one again.
    """
    skip = accelerator.skip_first_batches

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        rest = skip(dataloader, num_batches)
        if hasattr(rest, "iteration") and hasattr(dataloader, "iteration"):
            dataloader.iteration = rest.iteration + 1
        return rest

    accelerator.skip_first_batches = skip_first_batches
