"""Checks, before torch is imported, that its release works with this library and was tried."""

import re
import warnings
from importlib.util import find_spec
from pathlib import Path

from fastckpt._core.error_codes import coded
from fastckpt.errors import UnsupportedTorch

OLDEST, BELOW = (2, 10), (2, 16)
NEEDED = "torch>={}.{},<{}.{}".format(*OLDEST, *BELOW)


def check() -> None:
    """Compare the release that would be imported with those that were tried; a later one gets a warning.

    Raises:
        UnsupportedTorch: It is older than all that work.
    """
    version = _version()
    if not (numbers := re.match(r"(\d+)\.(\d+)", version)):
        return  # the import raises the error
    release = (int(numbers[1]), int(numbers[2]))
    if release < OLDEST:
        raise UnsupportedTorch(coded(f"torch {version} is too old for fastckpt; pip install {NEEDED!r}", "FC-042"))
    if release >= BELOW:
        warnings.warn(
            f"torch {version} is newer than all that fastckpt was tried with; if something fails, "
            f"pip install {NEEDED!r}",
            stacklevel=3,
        )


def _version() -> str:
    """The future torch.__version__, or nothing; without importing torch or reading metadata, which take longer."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return ""
    try:
        text = Path(found.origin).with_name("version.py").read_text()
    except OSError:
        return ""
    version = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE)
    return version[1] if version else ""
