"""Facts that a result depends on: cores, memory, accelerator, kernel, versions of what takes part."""

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
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


PEERS = "FASTCKPT_PEERS"
"""Names the folder with an environment for each peer, if it is not where ``make peers`` makes them by itself."""


def peers() -> Path:
    """The folder with environments of peers whose packages clash with those of the project."""
    return Path(os.environ.get(PEERS) or Path(sys.prefix) / "peers").absolute()


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
    places = [*sys.path, *(str(path) for path in peers().glob("*/lib/python*/site-packages"))]
    for package in PACKAGES:
        for each in metadata.distributions(name=package, path=places):
            found.setdefault(package, each.version)
    return found
