"""What /proc shows of a process: the command line and environment that it would have been executed with."""

import ctypes
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_libc = ctypes.CDLL(None)
_libc.sbrk.restype = ctypes.c_void_p
_kept: list[object] = []


class _Map(ctypes.Structure):
    """struct prctl_mm_map of linux/prctl.h; each comment is the number of the field in /proc/PID/stat."""

    _fields_ = (
        ("start_code", ctypes.c_uint64),  # 26
        ("end_code", ctypes.c_uint64),  # 27
        ("start_data", ctypes.c_uint64),  # 45
        ("end_data", ctypes.c_uint64),  # 46
        ("start_brk", ctypes.c_uint64),  # 47
        ("brk", ctypes.c_uint64),
        ("start_stack", ctypes.c_uint64),  # 28
        ("arg_start", ctypes.c_uint64),
        ("arg_end", ctypes.c_uint64),
        ("env_start", ctypes.c_uint64),
        ("env_end", ctypes.c_uint64),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def show(argv: Iterable[str], environment: Mapping[str, str]) -> bool:
    """Have /proc show this process as if it had been executed so; False where the kernel does not let it."""
    arguments = _block(argv)
    variables = _block(f"{name}={value}" for name, value in environment.items())
    text = ctypes.create_string_buffer(arguments + variables)
    start = ctypes.addressof(text)
    middle, end = start + len(arguments), start + len(arguments) + len(variables)
    stat = ["", "", "", *Path("/proc/self/stat").read_text().rpartition(")")[2].split()]
    code, data, brk = (int(stat[26]), int(stat[27])), (int(stat[45]), int(stat[46])), int(stat[47])
    image = _Map(*code, *data, brk, _libc.sbrk(0), int(stat[28]), start, middle, middle, end, 0, 0, 0xFFFFFFFF)
    done: int = _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(image), ctypes.sizeof(image), 0)
    _kept.append(text)
    return done == 0


def _block(texts: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(text) + b"\0" for text in texts)
