"""The protocol of objects whose state a checkpoint keeps."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """The protocol of torch.distributed.checkpoint: modules, optimizers, schedulers, scalers and loaders follow it."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a saved state."""
        ...
