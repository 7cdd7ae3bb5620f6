"""torch's compiler for scripts that use it: its modules, and what each process finds out about the machine for it."""

import importlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fastckpt_run.preload.environment import unless_set

MODULE = "torch._inductor.compile_fx"
"""Imports most of what the first call of a compiled model imports, 600 modules; it starts no thread, no process."""
CACHES = "TORCHINDUCTOR_CACHE_DIR"


def prepare() -> None:
    """Import the compiler, and have it find out which vector instructions it can use.

    For each kind of them it starts a process that loads a library, which takes a second, and keeps the answers for the
    life of its process: forks inherit them. Where the libraries are not built yet, that is left to the workers, since
    it takes long. Other releases of torch may have other names: then workers do all this themselves.
    """
    with suppress(ImportError):
        importlib.import_module(MODULE)
        instructions = importlib.import_module("torch._inductor.cpu_vec_isa")
        places = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
        with suppress(AttributeError, OSError), unless_set(CACHES, places.default_cache_dir()):
            if next(_entries(Path(places.cache_dir())), None) is not None:
                instructions.valid_vec_isa_list()


def _entries(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.is_dir() else iter(())
