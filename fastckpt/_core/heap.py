"""Settings of C libraries: threads that compute alone, and freed memory that goes back to the system at once."""

import ctypes
from functools import cache

import torch

M_MMAP_THRESHOLD = -3
THRESHOLD = 1 << 20


def compute_alone() -> None:
    """Have operations of torch in the calling thread, and in no other one, use this thread alone.

    Each thread that computes gets a team of OpenMP threads, which stays. With more threads than processors libgomp puts
    those that wait to sleep at once, in the teams of the training, too: each of its operations then waits to wake them.
    """
    torch.get_num_threads()  # torch sets the number of a thread once, when it first asks
    if limit := getattr(ctypes.CDLL(None), "omp_set_num_threads", None):
        limit(1)


@cache
def return_freed_memory() -> bool:
    """Have each allocation of a MiB or more mapped by itself, so that freeing unmaps it; returns whether that worked.

    glibc raises its threshold with each freed block, up to 32 MiB. Then freed activations stay in its heap, between
    used ones, and a process with offloading needs more memory than one without. This holds for the whole process, and
    cannot be undone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    return bool(mallopt and mallopt(M_MMAP_THRESHOLD, THRESHOLD))
