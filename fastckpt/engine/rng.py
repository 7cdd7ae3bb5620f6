"""The state of torch's random generators, as tensors."""

from typing import Any

import torch


def rng_state() -> dict[str, torch.Tensor]:
    """The generators of the CPU and of the current CUDA device, if CUDA is in use."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put the generators into a state that `rng_state` gave."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
