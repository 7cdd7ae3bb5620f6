"""The C library's heap, made to give the memory of activations back to the system when they are freed."""

import ctypes
from functools import cache

M_MMAP_THRESHOLD = -3
THRESHOLD = 1 << 20


@cache
def return_freed_memory() -> bool:
    """Have each allocation of a MiB or more mapped by itself, so that freeing unmaps it; returns whether that worked.

    glibc raises its threshold with each freed block, up to 32 MiB: then freed activations stay in its heap, between
    others that are in use, and a process with offloading needs more memory than one without. This holds for the whole
    process, and cannot be undone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    return bool(mallopt and mallopt(M_MMAP_THRESHOLD, THRESHOLD))
