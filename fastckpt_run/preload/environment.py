"""The process's environment: the variables read during imports, and its replacement by a worker's."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

PER_WORKER = re.compile(
    r"(GROUP_|ROLE_|LOCAL_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_(RESTART_COUNT|MAX_RESTARTS|RUN_ID|ERROR_FILE|USE_AGENT_STORE)|CUDA_VISIBLE_DEVICES|FASTCKPT_\w+"
)
"""Variables that differ from worker to worker, or from start to start."""

READ_BY_LIBRARIES = re.compile(
    r"(OMP|MKL|KMP|GOMP|OPENBLAS|GOTO|NUMEXPR|PYTORCH|TORCH(?!_NCCL|ELASTIC)\w*|LD|MALLOC|GLIBC)_\w+|PYTHON\w+|LANG|LC_\w+"
)
"""Variables that native libraries or Python read when they are loaded; such reads cannot be recorded."""

SCANS = {
    "tqdm.utils": "TQDM_",
    "networkx.utils.backends": "NETWORKX_",
    "fsspec.config": "FSSPEC",
    "torch._inductor.cpp_builder": "TORCH",
    "torch._inductor.utils": "TORCH",
}
"""Modules that go through all variables when they are imported, and the prefixes of the names that they keep.

torch imports tqdm where it is installed, and networkx for its compiler, which gives all to its child processes;
Lightning imports fsspec.
"""
_DEEPEST = 6
"""Callers that may be between a read and such a module, at most."""
RANK_KEEPERS = frozenset(
    {
        "lightning.fabric.utilities.rank_zero",
        "lightning_fabric.utilities.rank_zero",
        "torchmetrics.utilities.prints",
    }
)
"""Modules that keep the rank which they read in their body: `import_effects` has each worker read it again."""
_OF_RANK = frozenset({"RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"})
_READS_AGAIN = "fastckpt_run.preload.import_effects"

_read: set[str] = set()


class _Recording(os._Environ):  # type: ignore[type-arg]
    """os.environ that remembers the names of variables that were read."""

    def __getitem__(self, key: str) -> str:
        _record(os.fsdecode(key))  # subprocess asks for b"PATH", too
        value: str = super().__getitem__(key)
        return value

    def __contains__(self, key: object) -> bool:
        _record(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            _record(name)
            yield name


def _record(name: str) -> None:
    if name in _read:
        return
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEEPEST):
        if frame is None:
            break
        prefix = SCANS.get(frame.f_globals.get("__name__", ""))
        if (prefix is not None and not name.startswith(prefix)) or _is_read_again(name, frame):
            return
        frame = frame.f_back
    _read.add(name)


def _is_read_again(name: str, frame: FrameType) -> bool:
    """Return whether workers read a frame's variable again: not if others read it by a function of such a module."""
    module = frame.f_globals.get("__name__")
    is_body = module in RANK_KEEPERS and frame.f_code.co_name == "<module>"
    return name in _OF_RANK and (is_body or module == _READS_AGAIN)


@contextmanager
def recorded() -> Iterator[set[str]]:
    """The names of variables that are read while this lasts."""
    plain = type(os.environ)
    _read.clear()
    # The object itself stays: modules that have done `from os import environ` are recorded as well.
    os.environ.__class__ = _Recording
    try:
        yield _read
    finally:
        os.environ.__class__ = plain


@contextmanager
def unless_set(name: str, value: str) -> Iterator[None]:
    """A variable has a value while this lasts, unless it has one already."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def current() -> dict[str, str]:
    """The environment as it is; that is not recorded."""
    return {os.fsdecode(name): os.fsdecode(value) for name, value in os.environb.items()}


def replace(environment: Mapping[str, str]) -> None:
    """Make ``environment`` the whole environment, for Python and for C."""
    # os.environ calls putenv, so libraries in C see the same environment; which refuses the empty name that some
    # shells leave: the template has inherited that one, and it stays.
    for name in filter(None, list(os.environ)):
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if name})
