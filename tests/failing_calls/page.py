"""The library that makes calls fail, and the page of memory that says which one of which process."""

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import PATH

SOURCE = Path(__file__).with_name("preloaded.c")
VARIABLE = "FAILING_CALLS_PAGE"
CALLS = ("open", "list", "stat", "read", "write", "fsync", "rename", "link", "unlink", "mkdir", "rmdir", "fallocate",
         "truncate", "mmap", "close", "flock", "copy")  # fmt: skip
"""The kinds of calls; at-variants, and those of other names for the same, are of the kind of the plain one."""
ROLES = ("agent", "rank 0", "rank 1")
"""The processes of a job."""
PLACES = ("storage", "memory")
"""Folders of a case, the checkpoint directory and shared memory: a fault concerns one of them."""
_PATH, _FOREVER, _SHORT = 512, 1, 2


class _Page(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("armed", "call", "role", "error", "mode", "unused")),
        ("number", ctypes.c_long),
        ("fired", ctypes.c_long),
        ("made", ctypes.c_long * (len(ROLES) * len(CALLS))),
        ("within", ctypes.c_char * _PATH),
        ("named", ctypes.c_char * _PATH),
        ("where", ctypes.c_char * _PATH),
    )


@dataclass(frozen=True, order=True)
class Fault:
    """One call that fails: the ``number``-th of its kind that a process makes in a place.

    ``error`` is a name of errno; "short" for a read or write that does half of it. With ``forever`` all later ones
    fail as well. Of paths that have a ``name`` in them, if that is given.
    """

    role: str
    place: str
    call: str
    number: int
    error: str
    forever: bool = False
    name: str = ""

    def __str__(self) -> str:
        which = f"{self.call} {self.number}{' and later' if self.forever else ''}{self.name and f' of {self.name}'}"
        return f"{self.error} at {which} by {self.role} in {self.place}"


class Page:
    """The page of a case, mapped by all its processes."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._page = _Page.from_buffer(self._map)

    def count(self, within: Path) -> None:
        """Count the calls on a folder from now on."""
        self._arm(within, call=-1)

    def arm(self, fault: Fault, within: Path) -> None:
        """Have a call on a folder fail."""
        mode = _FOREVER * fault.forever + _SHORT * (fault.error == "short")
        number = 0 if fault.error == "short" else getattr(errno, fault.error)
        role, call = ROLES.index(fault.role), CALLS.index(fault.call)
        self._arm(within, fault.name, call=call, role=role, error=number, mode=mode, number=fault.number)

    def _arm(self, within: Path, name: str = "", **fields: int) -> None:
        ctypes.memset(ctypes.addressof(self._page), 0, ctypes.sizeof(_Page))
        self._page.within, self._page.named = f"{within}".encode(), name.encode()
        for name, value in fields.items():
            setattr(self._page, name, value)
        self._page.armed = 1

    def disarm(self) -> None:
        """Have no more calls fail; what happened can still be read."""
        self._page.armed = 0

    @property
    def where(self) -> str:
        """The call that failed, and its path; empty if none has."""
        return str(self._page.where.decode(errors="replace"))

    @property
    def made(self) -> dict[tuple[str, str], int]:
        """How many calls of each kind each process made while this was armed."""
        pairs = [(role, call) for role in ROLES for call in CALLS]
        return {pair: number for pair, number in zip(pairs, self._page.made, strict=True) if number}


def be(role: str) -> None:
    """Be a process of this role from now on."""
    ctypes.CDLL(None).failing_calls_role(ROLES.index(role))


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def environment(folder: Path) -> dict[str, str]:
    """The variables with which a process, and its forks, have their calls watched; compiles the library."""
    library, page = folder / "preloaded.so", folder / "page"
    command = [compiler() or "cc", "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"]
    subprocess.run(command, check=True)
    page.write_bytes(bytes(-(-ctypes.sizeof(_Page) // mmap.PAGESIZE) * mmap.PAGESIZE))
    own = {"LD_PRELOAD": str(library), VARIABLE: str(page), "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    return os.environ | own


SWEEP = {
    "storage": {
        "open": ("EMFILE", "EIO", "ESTALE"), "list": ("EMFILE", "EIO"), "stat": ("ESTALE",),
        "read": ("EIO", "ESTALE", "short"), "write": ("ENOSPC", "EIO", "short"), "fsync": ("EIO",),
        "rename": ("EIO", "ESTALE"), "link": ("EIO",), "unlink": ("EIO", "EACCES"), "mkdir": ("ENOSPC", "EACCES"),
        "rmdir": ("EIO",), "fallocate": ("ENOSPC",), "truncate": ("ENOSPC",), "mmap": ("ENOMEM",), "close": ("EIO",),
        "flock": ("EIO",), "copy": ("EIO", "short"),
    },
    "memory": {
        "open": ("EMFILE",), "list": ("EMFILE",), "read": ("EIO", "short"), "write": ("ENOSPC", "short"),
        "rename": ("ENOMEM",), "link": ("ENOMEM",), "unlink": ("ENOMEM",), "mkdir": ("ENOSPC",), "rmdir": ("ENOMEM",),
        "fallocate": ("ENOSPC",), "truncate": ("ENOMEM",), "mmap": ("ENOMEM",), "flock": ("ENOMEM",),
        "copy": ("ENOSPC",),
    },
}  # fmt: skip
"""What calls of each kind fail with in each place: the errors that these have there, and that are judged apart."""


LASTING = ("write", "fsync", "rename", "mkdir", "unlink", "fallocate", "mmap")
"""Calls that also all fail, for as long as a procedure takes: a disk, or memory, that is full or broken."""


def sweep(place: str, made: Iterable[tuple[str, str, int]]) -> list[Fault]:
    """A fault for each call that was counted, and each of its errors."""
    errors = [(role, call, count, error) for role, call, count in made for error in SWEEP[place].get(call, ()) if count]
    once = [
        Fault(role, place, call, number, error) for role, call, count, error in errors for number in range(1, count + 1)
    ]
    lasting = [each for each in errors if each[1] in LASTING and each[3] != "short"]
    return once + [Fault(role, place, call, 1, error, forever=True) for role, call, _, error in lasting]
