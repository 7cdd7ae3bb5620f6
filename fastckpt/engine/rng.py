"""The state of torch's random generators, as tensors."""

from typing import Any

import torch


def rng_state() -> dict[str, torch.Tensor]:
    """The generators of the CPU and, if accelerators are in use, of the current one by its kind, of others by name."""
    state = {"cpu": torch.get_rng_state()}
    for name, accelerator in _accelerators().items():
        # to look for devices would keep workers of a loader from being forked
        if getattr(accelerator, "is_initialized", accelerator.is_available)():
            state[name] = accelerator.get_rng_state()
            state |= {f"{name}:{index}": accelerator.get_rng_state(index) for index in _others(accelerator)}
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put the generators into a state that `rng_state` gave."""
    torch.set_rng_state(state["cpu"])
    for name, accelerator in _accelerators().items():
        if name in state and accelerator.is_available():
            accelerator.set_rng_state(state[name])
            for index in _others(accelerator):
                if f"{name}:{index}" in state:
                    accelerator.set_rng_state(state[f"{name}:{index}"], index)


def _others(accelerator: Any) -> list[int]:
    """The devices that are not the current one: a model may lie on several."""
    return [index for index in range(accelerator.device_count()) if index != torch.accelerator.current_device_index()]


def _accelerators() -> dict[str, Any]:
    """The module of the kind that this torch was built for, by its name; torch has one kind at most."""
    found = torch.accelerator.current_accelerator()
    return {} if found is None else {found.type: torch.get_device_module(found)}
