"""A way to save the state of a job, and a save of it that is under way."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite._training import Training

State = dict[str, Any]
Wait = Callable[[], object]
LIMIT = 120.0
"""Seconds that a save may take until it is durable."""


def nothing() -> None:
    """Wait for nothing."""


@dataclass(frozen=True)
class Saving:
    """A save that is under way.

    Attributes:
        durable: Returns once the way calls it saved on storage; None if it goes to memory alone.
        staged: Returns once training may change the state.
    """

    durable: Wait | None = None
    staged: Wait = nothing


class Way:
    """A way to save; constructed before the first step that counts."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.open()

    def open(self) -> None:
        """Make what is kept between saves."""

    def ready(self) -> None:
        """Have memory made before the first save, for those that can."""

    def save(self, step: int) -> Saving:
        """Begin a save; training goes on when this returns."""
        raise NotImplementedError

    def load(self, step: int) -> list[torch.Tensor]:
        """The tensors of what was saved last, in the order of the state's."""
        raise NotImplementedError

    def remove(self, step: int) -> None:
        """Delete what a step has left on storage."""
        for path in self.folder.glob(f"*{step:04}*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def close(self) -> None:
        """Give back what is kept between saves."""

    def path(self, step: int) -> Path:
        """Return the path of the file or folder of a step."""
        return self.folder / f"{step:04}"

    def blank(self) -> State:
        """A state of the same structure, with other values."""
        return blank(self.training.state())


def blank(node: Any) -> Any:
    """The same structure with tensors of -1."""
    if isinstance(node, torch.Tensor):
        return torch.full_like(node, -1)
    if isinstance(node, dict):
        return {key: blank(value) for key, value in node.items()}
    return [blank(value) for value in node] if isinstance(node, list | tuple) else node


def appears(path: Path, text: str) -> None:
    """Wait until a file has this text."""
    deadline = time.monotonic() + LIMIT
    while not path.exists() or path.read_text().strip() != text:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} does not say {text} after {LIMIT} s")
        time.sleep(0.005)
