"""Compares nested states with torch alone, and a state that runs code: it knows no fastckpt."""

import os
from pathlib import Path
from typing import Any

import torch


def same(got: Any, want: Any) -> bool:
    if isinstance(want, torch.Tensor):
        return type(got) is type(want) and bool(got.dtype == want.dtype) and torch.equal(got, want)
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(same(got[key], want[key]) for key in want)
    if isinstance(want, list | tuple):
        return len(got) == len(want) and all(map(same, got, want))
    return bool(got == want) or (hasattr(want, "__dict__") and vars(got) == vars(want))


def zeros(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return torch.zeros_like(node)
    return {key: zeros(value) for key, value in node.items()} if isinstance(node, dict) else node


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)
