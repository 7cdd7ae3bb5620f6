"""The states of the random generators of a process: torch's, Python's and numpy's."""

import logging
import random
from typing import Any

import numpy as np
import torch

logger = logging.getLogger("fastckpt")


def rng_state() -> dict[str, Any]:
    """The global generators, as what loads with ``weights_only=True``.

    Those of Python, of numpy, of the CPU and, if accelerators are in use, of the current one by its kind, of others by
    name.
    """
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": _of_python(), "numpy": _of_numpy()}
    for name, accelerator in _accelerators().items():
        # to look for devices would keep workers of a loader from being forked
        if getattr(accelerator, "is_initialized", accelerator.is_available)():
            state[name] = accelerator.get_rng_state()
            state |= {f"{name}:{index}": accelerator.get_rng_state(index) for index in _others(accelerator)}
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put the generators into a state that `rng_state` gave; earlier versions gave none of Python and numpy."""
    torch.set_rng_state(state["cpu"])
    if "python" in state:
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers.tolist()), gauss))
    if "numpy" in state:
        _restore_numpy(state["numpy"])
    for name, accelerator in _accelerators().items():
        if name in state and accelerator.is_available():
            accelerator.set_rng_state(state[name])
            for index in _others(accelerator):
                if f"{name}:{index}" in state:
                    accelerator.set_rng_state(state[f"{name}:{index}"], index)


def _of_python() -> list[Any]:
    version, numbers, gauss = random.getstate()
    return [version, torch.from_numpy(np.array(numbers)), gauss]  # torch.tensor takes five times as long


def _of_numpy() -> dict[str, Any]:
    """As numpy gives it, with tensors for its arrays, which are of numbers without sign."""
    return dict(_each(np.random.get_state(legacy=False)))


def _each(state: Any) -> Any:
    """A dict of dicts with tensors, with sign, for arrays, and arrays for tensors."""
    if isinstance(state, dict):
        return {name: _each(value) for name, value in state.items()}
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.view(f"i{state.itemsize}").copy())
    return state.numpy().view(f"u{state.element_size()}") if isinstance(state, torch.Tensor) else state


def _restore_numpy(state: dict[str, Any]) -> None:
    """Leave it as it is, and say so, if numpy's generator is of another kind now."""
    kind: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != kind["bit_generator"]:
        logger.warning(
            "numpy's random numbers start anew: the checkpoint has the state of %s, and numpy.random uses %s now",
            state["bit_generator"],
            kind["bit_generator"],
        )
        return
    np.random.set_state(_each(state))


def _others(accelerator: Any) -> list[int]:
    """The devices that are not the current one: a model may lie on several."""
    return [index for index in range(accelerator.device_count()) if index != torch.accelerator.current_device_index()]


def _accelerators() -> dict[str, Any]:
    """The module of the kind that this torch was built for, by its name; torch has one kind at most."""
    found = torch.accelerator.current_accelerator()
    return {} if found is None else {found.type: torch.get_device_module(found)}
