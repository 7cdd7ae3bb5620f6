"""Checks of the directory of arenas: whether it is shared memory, how large it is, and whether it keeps bytes."""

import os
from collections.abc import Iterator

from fastckpt._core.byte_sizes import binary
from fastckpt._core.memory.headroom import lies_in_memory, unreserved
from fastckpt._core.policy.memory_reserve import RESERVE
from fastckpt._core.policy.node_check import Verdict
from fastckpt._core.saver.arena_location import place
from fastckpt_run.doctor.diagnosis import Diagnosis, Subject, ok, problem, warning
from fastckpt_run.doctor.mounts import mount_of
from fastckpt_run.node_check.file_checks import check_shm

OF_DOCKER = 64 << 20
"""Bytes of /dev/shm in a container that was started without an option for it."""
_WRITTEN = 1 << 20


def shared_memory(subject: Subject) -> Iterator[Diagnosis]:
    """Check that there is a directory for arenas, of the kind that the settings ask for."""
    directory = place(subject.job)  # the launcher's own refusal
    mount = mount_of(directory)
    found = f"{directory} is on {mount.kind} mounted at {mount.point}" if mount else f"{directory} is there"
    if subject.job.memory and not lies_in_memory(directory):
        yield warning(
            "shared memory",
            f"{found}: each save is written to a disk, and waits for it",
            "Give a directory on a tmpfs (--fast-shm-dir, FASTCKPT_SHM_DIR), or say that a disk is meant: "
            "--fast-no-memory",
        )
    else:
        yield ok("shared memory", found)


def shared_memory_size(subject: Subject) -> Iterator[Diagnosis]:
    """Find the bytes that can be written there, by the tightest of all limits."""
    directory = place(subject.job)
    status = os.statvfs(directory)
    size, found = status.f_blocks * status.f_frsize, unreserved(directory)
    name, text = "shared memory size", str(found)
    if size <= OF_DOCKER and lies_in_memory(directory):
        yield warning(
            name,
            f"{text}; {binary(size)} is what Docker and Kubernetes give a container by default, and memory is to hold "
            "two or three whole checkpoints of this node's ranks",
            found.remedies((4 << 30) - size) + ". How much it takes: fastckpt plan",
        )
    elif found.free < RESERVE:
        yield problem(name, f"{text}: less than the {binary(RESERVE)} that are left to others", found.remedies(RESERVE))
    elif found.free < found.total // 10:
        yield warning(name, text, found.remedies(found.total // 10 - found.free))
    else:
        yield ok(name, text)


def shared_memory_writes(subject: Subject) -> Iterator[Diagnosis]:
    """Check that it keeps bytes and modes, by the check that `fastckpt check` makes."""
    directory = str(place(subject.job))
    result = check_shm("", directory, False, _WRITTEN)
    if result.verdict is Verdict.OK:
        yield ok("shared memory writes", f"{directory} keeps bytes and private modes")
    else:
        yield problem("shared memory writes", result.message, "Name another tmpfs (--fast-shm-dir, FASTCKPT_SHM_DIR)")
