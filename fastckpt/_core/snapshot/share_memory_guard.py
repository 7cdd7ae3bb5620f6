"""Has torch wait before it moves memory that is being copied to where other processes see it."""

from collections.abc import Callable, Iterable

import torch

from fastckpt._core.torch_private.tensors import share_memory_lock, share_memory_map, storage_key


class ShareMemoryGuard:
    """What ``share_memory_`` and a queue of torch.multiprocessing wait for before they move one of these storages.

    Both free the memory where a storage was. torch lets a thread that is to share a storage wait for one that is at
    it, by an entry in a map; this is such an entry.

    Args:
        storages: Not to be moved until `lift`.
        wait: Returns when they may be.
    """

    def __init__(self, storages: Iterable[torch.UntypedStorage], wait: Callable[[], None]) -> None:
        self._keys = [*map(storage_key, storages)]
        self._wait = wait
        with share_memory_lock:
            for key in self._keys:
                share_memory_map.setdefault(key, self)  # type: ignore[arg-type]

    def __enter__(self) -> None:
        self._wait()

    def __exit__(self, *_: object) -> None:
        """As a lock; there is nothing to release."""

    def lift(self) -> None:
        """Let them be moved at once."""
        with share_memory_lock:
            for key in self._keys:
                if share_memory_map.get(key) is self:  # type: ignore[comparison-overlap]
                    del share_memory_map[key]
