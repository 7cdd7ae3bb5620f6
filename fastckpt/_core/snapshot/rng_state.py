"""The states of the random generators of a process: torch's, Python's and numpy's."""

import logging
import random
from typing import Any

import numpy as np
import torch

logger = logging.getLogger("fastckpt")


def rng_state() -> dict[str, Any]:
    """The states of the global generators, in types that load with ``weights_only=True``.

    Python's, numpy's, torch's of the CPU and, if accelerators are in use, that of the current one by its kind and of
    others by name.
    """
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": _of_python(), "numpy": _of_numpy()}
    for name, accelerator in _accelerators().items():
        # Looking for devices may initialize the driver, after which a data loader cannot fork its workers.
        if getattr(accelerator, "is_initialized", accelerator.is_available)():
            state[name] = accelerator.get_rng_state()
            state |= {f"{name}:{index}": accelerator.get_rng_state(index) for index in _others(accelerator)}
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Set the generators to a result of `rng_state`; earlier versions saved none of Python and numpy."""
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
    return [version, torch.from_numpy(np.fromiter(numbers, np.int64, len(numbers))), gauss]  # the fastest of all ways


def _of_numpy() -> dict[str, Any]:
    """The state as numpy gives it, with signed tensors in place of its unsigned arrays."""
    return dict(_each(np.random.get_state(legacy=False)))


def _each(state: Any) -> Any:
    """The same dict with unsigned arrays replaced by signed tensors of the same bytes, or the other way round."""
    if isinstance(state, dict):
        return {name: _each(value) for name, value in state.items()}
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.view(f"i{state.itemsize}").copy())
    return state.numpy().view(f"u{state.element_size()}") if isinstance(state, torch.Tensor) else state


def _restore_numpy(state: dict[str, Any]) -> None:
    """Restore numpy's generator; if it is of another kind now, leave it as it is, with a warning."""
    kind: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != kind["bit_generator"]:
        logger.warning(
            "numpy's random state is not restored: the checkpoint has the state of %s, and numpy.random uses %s now",
            state["bit_generator"],
            kind["bit_generator"],
        )
        return
    np.random.set_state(_each(state))


def _others(accelerator: Any) -> list[int]:
    """The devices other than the current one: a model may be on several."""
    return [index for index in range(accelerator.device_count()) if index != torch.accelerator.current_device_index()]


def _accelerators() -> dict[str, Any]:
    """The device module of the accelerator that this torch was built for, by its name; there is one at most."""
    found = torch.accelerator.current_accelerator()
    return {} if found is None else {found.type: torch.get_device_module(found)}
