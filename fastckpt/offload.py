"""Training with activations on an SSD, for larger batches and longer sequences in the same memory."""

import logging
import os
import threading
from collections import deque
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, Self

from fastckpt._core import arguments
from fastckpt._core.arguments import public
from fastckpt._core.byte_sizes import binary, parsed
from fastckpt._core.offload.offload_report import OffloadReport
from fastckpt._core.offload.offloader import Offloader
from fastckpt.errors import ArgumentError, ConfigError, FastckptError

__all__ = ["ActivationOffload", "OffloadReport"]

SMALLEST_BUDGET = 4 << 20
"""With less, the tensors on the way out may have fewer bytes than the smallest that is offloaded."""
MADE_AGAIN = 4
"""Objects in a row, each for one forward, after which a warning recommends one for all."""
_SIZES = "bytes, or a text such as '4GiB', 4 MiB or more, or 'auto'"

logger = logging.getLogger("fastckpt")
_made: dict[str, deque[list[int]]] = {}
"""Numbers of forwards of the newest objects, by directory."""


class ActivationOffload:
    """Writes activations that a forward saves for its backward to an SSD, and reads them ahead of their use.

    Enter it around each forward; backwards may be anywhere. Gradients are bitwise equal. The first step is profiled;
    later ones write tensors that do not fit the budget (docs/guides/offload.md).

    Args:
        directory: Existing directory on a local SSD, in which no file is left.
        budget: Activations in memory: bytes, or text such as "4GiB"; "auto": the least that costs no time.
        consistency: For saved tensors that are changed in place. "check": the backward raises autograd's error. "copy":
            each tensor is copied.
        half: Store 32-bit floats in 16 bits, which changes gradients.
        return_memory: Have glibc return freed blocks of a MiB or more at once, in the whole process; CPU processes may
            need it.
    """

    @public
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        budget: int | str = "auto",
        consistency: Literal["check", "copy"] = "check",
        half: bool = False,
        return_memory: bool = True,
    ) -> None:
        copies = arguments.choice("consistency", consistency, ("check", "copy")) == "copy"
        for name, value in (("half", half), ("return_memory", return_memory)):
            arguments.instance(name, value, bool, "True or False", f"{name}=True")
        place, size = _existing(directory), _bytes(budget)
        try:
            self._offloader = Offloader(place, size, copies=copies, half=half, unmap=return_memory)
        except OSError as error:
            raise ConfigError(
                f"directory is {os.fspath(place)!r}, where no file can be made: {error.strerror or error}; give a "
                "directory on a local SSD that this user may write to"
            ) from error
        self._entered: list[AbstractContextManager[None]] = []
        self._pid, self._thread = os.getpid(), 0
        self._forwards = [0]
        _warn_if_made_again(str(place), self._forwards)

    @public
    def __enter__(self) -> Self:
        self._refuse_if_forked("entered")
        thread = threading.get_ident()
        if self._entered and thread != self._thread:
            raise FastckptError(
                "this ActivationOffload is entered in two threads at a time, and can follow one forward alone; make "
                "one for each thread"
            )
        self._thread = thread
        self._forwards[0] += 1
        forward = self._offloader.forward()
        forward.__enter__()
        self._entered.append(forward)
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.pop().__exit__(*exc)  # type: ignore[arg-type]

    @public
    def report(self) -> OffloadReport:
        """Report of the bytes written and kept, the waits, and the plan; prints as a few lines."""
        self._refuse_if_forked("asked for its report")
        return self._offloader.report()

    def _refuse_if_forked(self, what: str) -> None:
        # There, locks that threads of the parent held at the fork are never released.
        if os.getpid() != self._pid:
            raise FastckptError(
                f"this ActivationOffload is of process {self._pid}, and {what} in {os.getpid()}, which was forked "
                "from it and has none of its threads; make one in each process"
            )


def _warn_if_made_again(directory: str, forwards: list[int]) -> None:
    """Warn, once, of an object for each step: a profile of a step is of use in the same object's next step alone."""
    made = _made.setdefault(directory, deque(maxlen=MADE_AGAIN))
    if [count for (count,) in made] == [1] * MADE_AGAIN:
        logger.warning(
            "%d ActivationOffloads in a row were made for one forward each: each profiles that step, writes all of it, "
            "and knows nothing of the next one. Make one before the loop, and enter it in each step",
            MADE_AGAIN,
        )
        made = _made[directory] = deque(maxlen=0)
    made.append(forwards)


def _existing(directory: object) -> Path:
    wanted = "an existing directory on a local SSD, such as '/nvme/scratch'"
    if not isinstance(directory, str | os.PathLike) or not isinstance(text := os.fspath(directory), str) or not text:
        raise ArgumentError(f"directory is {arguments.shown(directory)}; give {wanted}")
    text = arguments.path("directory", text)
    if "://" in text:
        raise ConfigError(f"directory is {text!r}, a URL, and activations go to a local disk; give {wanted}")
    if not Path(text).is_dir():
        what = "is not a directory" if Path(text).exists() else "does not exist"
        raise ConfigError(f"directory is {text!r}, which {what}; make it on a local SSD, not in memory as a tmpfs is")
    return Path(text)


def _bytes(budget: object) -> int | None:
    if budget == "auto":
        return None
    try:
        size = parsed(budget) if isinstance(budget, str) else budget
    except ValueError:
        size = None
    if not isinstance(size, int) or isinstance(size, bool):
        raise ConfigError(f"budget is {arguments.shown(budget)}; give {_SIZES}{arguments.meant(budget, ['auto'])}")
    if size < SMALLEST_BUDGET:
        raise ConfigError(
            f"budget is {size} bytes, less than {binary(SMALLEST_BUDGET)}, of which a quarter may be on the way out; "
            f"give {_SIZES}"
        )
    return size
