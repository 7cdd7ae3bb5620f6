"""The options of public functions: each is named in the signature, so that help() and editors show it."""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .test_public_imports import IMPORTS, NEEDS

OTHERS = {
    "AccelerateCheckpointer.load_state": "load_state_kwargs",
    "DeepSpeedCheckpointer.load_checkpoint": "named",
    "FastCheckpointMixin": "kwargs",
    "FastCheckpointMixin.train": "kwargs",
    "FastCheckpointTrainer.train": "kwargs",
    "FlashCkptTrainer.train": "kwargs",
    "FastCheckpointMixin.evaluate": "kwargs",
    "FastCheckpointTrainer.evaluate": "kwargs",
    "FlashCkptTrainer.evaluate": "kwargs",
    "ResumableDataLoader": "options",
    "SharedMemoryReader.read_metadata": "__",
    "SharedMemoryReader.set_up_storage_reader": "kwargs",
    "SharedMemoryWriter.set_up_storage_writer": "kwargs",
}
"""Arguments that are handed on to the framework's own function of this name, whose documentation has them."""


def functions(module: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions, classes and methods that a module offers to users, but for what it inherits from a framework."""
    for name in IMPORTS[module]:
        item = getattr(importlib.import_module(module), name)
        if inspect.isfunction(item):
            yield name, item
        if not inspect.isclass(item):
            continue
        if "__init__" in vars(item):
            yield name, vars(item)["__init__"]
        for method, each in inspect.getmembers(item, inspect.isfunction):
            if not method.startswith("_") and each.__module__.startswith("fastckpt"):
                yield f"{name}.{method}", each


@pytest.mark.parametrize("module", IMPORTS)
def test_public_functions_name_all_of_their_options(module: str) -> None:
    if module in NEEDS and importlib.util.find_spec(NEEDS[module]) is None:
        pytest.skip(f"{NEEDS[module]} is not installed")
    unnamed = {
        name: parameter.name
        for name, function in functions(module)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.VAR_KEYWORD
    }
    assert {name: each for name, each in unnamed.items() if OTHERS.get(name) != each} == {}
