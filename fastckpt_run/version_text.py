"""The versions of this library and of what it runs on, as ``--version`` of both commands tells them."""

import platform
from importlib.metadata import PackageNotFoundError, version

from fastckpt._core.version import VERSION


def version_line(command: str) -> str:
    """What ``--version`` of a command prints. Nothing is imported for it: torch would take a second."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "missing"
    return f"{command} {VERSION} (torch {torch}, Python {platform.python_version()})"
