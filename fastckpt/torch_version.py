"""A word, before torch is imported, about a release of it that does not work with this library, or was never tried."""

import re
import warnings
from importlib.metadata import PackageNotFoundError, version

from fastckpt.errors import UnsupportedTorch

OLDEST, BELOW = (2, 10), (2, 16)
NEEDED = "torch>={}.{},<{}.{}".format(*OLDEST, *BELOW)


def check() -> None:
    """Compare the release that is installed with those that were tried; a later one gets a warning.

    Raises:
        UnsupportedTorch: It is older than all that work.
    """
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return  # importing it will say so, or it is there without having been installed
    if not (numbers := re.match(r"(\d+)\.(\d+)", installed)):
        return
    release = (int(numbers[1]), int(numbers[2]))
    if release < OLDEST:
        raise UnsupportedTorch(f"torch {installed} is too old for fastckpt; pip install {NEEDED!r}")
    if release >= BELOW:
        warnings.warn(
            f"torch {installed} is newer than all that fastckpt was tried with; if something fails, "
            f"pip install {NEEDED!r}",
            stacklevel=3,
        )
