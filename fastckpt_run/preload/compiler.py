"""torch's compiler for scripts that use it: its modules, and facts about the machine that each process finds out."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from fastckpt_run.preload.environment import unless_set

MODULE = "torch._inductor.compile_fx"
"""Imports most modules that a compiled model's first call imports, 600 of them; it starts no thread, no process."""
CACHES = "TORCHINDUCTOR_CACHE_DIR"


class _NotBuilt(BaseException):  # torch catches each Exception, and would take it for an answer
    """A library would have to be built first."""


def prepare() -> None:
    """Import the compiler, and have it find out which vector instructions it can use.

    For each kind of them it starts a process that loads a library, which takes a second, and keeps the answers for the
    life of its process: forks inherit them. Where a library is not built yet, that is left to the workers, since it
    takes long. Other releases of torch may have other names: then workers do all this themselves.
    """
    with suppress(ImportError):
        importlib.import_module(MODULE)
        instructions = importlib.import_module("torch._inductor.cpu_vec_isa")
        places = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
        builder = importlib.import_module("torch._inductor.cpp_builder")
        with (
            # RuntimeError: torch raises one of that kind where there is no C++ compiler; others may do without one
            suppress(_NotBuilt, AttributeError, OSError, RuntimeError),
            # torch itself sets it to the usual place where it is not set, which workers are to do
            unless_set(CACHES, places.default_cache_dir()),
            _building_nothing(builder.CppBuilder),
        ):
            instructions.valid_vec_isa_list()


@contextmanager
def _building_nothing(builder: Any) -> Iterator[None]:
    """Have builds raise _NotBuilt while this lasts."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise _NotBuilt

    build, builder.build = builder.build, refuse
    try:
        yield
    finally:
        builder.build = build
