"""Facts that a result depends on: cores, memory, accelerator, kernel, versions of what takes part."""

import os
import platform
from importlib import metadata
from typing import Any

import psutil
import torch

PACKAGES = (
    "torch",
    "safetensors",
    "torchsnapshot",
    "dlrover",
    "nvidia-resiliency-ext",
    "orbax-checkpoint",
    "deepspeed",
)


def machine() -> dict[str, Any]:
    """The machine, without any name by which it could be found."""
    facts: dict[str, Any] = {
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "kernel": platform.release().split("-")[0],
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def versions() -> dict[str, str]:
    """Versions of Python, fastckpt and the peers that are installed."""
    from fastckpt._core.version import VERSION

    found = {"python": platform.python_version(), "fastckpt": VERSION}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
