"""Verdicts on errors of reading, as a table; and that one that is no verdict says what its user can do."""

import errno
import itertools
import os
import pickle
import resource
import struct
import zipfile

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from fastckpt._core.io.read_errors import Phase, ReadVerdict, in_words, remedy, verdict, worst
from fastckpt._core.policy.resume import MEMORY, PEER, REMOTE, STORAGE
from fastckpt.errors import AgentLost, ArenaTooSmall, BadCheckpoint, FastckptError, PersistError, SaverError
from tests.support.tables import for_each

DAMAGE, NO_ANSWER, MISTAKE = ReadVerdict.DAMAGE, ReadVerdict.NO_ANSWER, ReadVerdict.USERS_MISTAKE


def of(*numbers: int) -> list[OSError]:
    return [OSError(number, os.strerror(number), "/c/model.pt") for number in numbers]


SILENT = [errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTUNREACH, errno.ECONNRESET, errno.ENODEV]
SILENT += [errno.EBUSY, errno.EACCES, errno.EPERM]
NO_ROOM = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN]
IN_ALL_PHASES = {
    NO_ANSWER: [
        *of(*NO_ROOM, *SILENT),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("[enforce fail] . DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("unable to mmap 4096 bytes from file </c/model.pt>: Cannot allocate memory (12)"),
        RuntimeError("unable to open file </c/model.pt> in read-only mode: Too many open files (24)"),
        RuntimeError("can't start new thread"),
        SaverError("OSError: [Errno 24] Too many open files: '/dev/shm/x'"),
        SaverError("MemoryError: "),
        ImportError("/lib/x.so: cannot open shared object file: Too many open files"),
        *of(errno.EBADF, errno.ENOLINK, 528, errno.ENOSPC, errno.EDQUOT),
        ArenaTooSmall("5 GiB of other nodes do not fit beside the slots"),
        SaverError("OSError: [Errno 28] No space left on device: '/dev/shm/x'"),
        TimeoutError("it took longer than 5 s"),
        PersistError("s3://bucket does not answer"),
    ],
    DAMAGE: [
        *of(errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL),
        OSError("/c/.begin is not a regular file"),
        BadCheckpoint("its xxh3-128 is 0; 1 was saved"),
        BadCheckpoint("/c/model.pt has 5 bytes; 6 were saved"),
        RuntimeError("unable to open file </c/model.pt> in read-only mode: No such file or directory (2)"),
        FastckptError("no node has it any more"),
    ],
}
OF_LOADERS = [
    pickle.UnpicklingError("invalid load key"),
    zipfile.BadZipFile("File is not a zip file"),
    RuntimeError("PytorchStreamReader failed reading zip archive: failed finding central directory"),
    RuntimeError("the model has another shape"),
    ImportError("No module named 'x'"),
    AttributeError("x"),
    KeyError("x"),
    EOFError(),
    struct.error("unpack requires 8 bytes"),
]


def test_want_of_room_or_of_an_answer_says_nothing_and_lost_bytes_are_damage():
    rows = itertools.product(IN_ALL_PHASES.items(), Phase, (STORAGE, REMOTE))
    cases = [(error, phase, tier, expected) for (expected, errors), phase, tier in rows for error in errors]
    assert [case for case in cases if verdict(*case[:3]) is not case[3]] == []


def test_what_a_loader_refuses_is_no_damage_of_bytes_that_were_read():
    expected = {phase: MISTAKE if phase in (Phase.UNPICKLING, Phase.APPLYING) else DAMAGE for phase in Phase}
    found = [{phase: verdict(error, phase) for phase in Phase} for error in OF_LOADERS]
    assert found == [expected] * len(OF_LOADERS)


@for_each(
    (MEMORY, errno.EACCES, DAMAGE),  # it is not ours
    (MEMORY, errno.EMFILE, NO_ANSWER),
    (MEMORY, errno.ENOENT, DAMAGE),
    (PEER, errno.ETIMEDOUT, DAMAGE),  # the node is gone
    (PEER, errno.ENOMEM, NO_ANSWER),
    (STORAGE, errno.ETIMEDOUT, NO_ANSWER),
)
def test_a_verdict_may_depend_on_the_tier(tier, number, expected):
    assert verdict(*of(number), Phase.OPENING, tier) is expected
    assert verdict(AgentLost("it is gone"), Phase.OPENING, STORAGE) is NO_ANSWER


def test_the_exception_of_ranks_that_torch_raises_has_the_verdict_of_its_parts():
    """It is a BaseException, and tells what each rank met."""

    def of_ranks(*errors: BaseException) -> CheckpointException:
        return CheckpointException("read", {rank: (error, None) for rank, error in enumerate(errors)})  # type: ignore[misc]

    refused, (no_room,), (lost,) = RuntimeError("unsupported method"), of(errno.ENOMEM), of(errno.EIO)
    assert verdict(of_ranks(refused), Phase.APPLYING) is MISTAKE
    assert verdict(of_ranks(refused, no_room), Phase.APPLYING) is NO_ANSWER
    assert verdict(of_ranks(no_room, lost), Phase.APPLYING) is DAMAGE
    assert (worst([NO_ANSWER, DAMAGE, MISTAKE]), worst([MISTAKE, NO_ANSWER])) == (DAMAGE, NO_ANSWER)


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, 1 << 50])
def test_a_remedy_names_the_limit_that_was_met(limit):
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert f"may have {files} files open: raise ulimit -n" in in_words(*of(errno.EMFILE))
        assert "fs.file-max" in remedy(*of(errno.ENFILE))
        of_memory = "cgroup" if limit == resource.RLIM_INFINITY else f"ulimit -v allows it {limit} bytes"
        assert of_memory in remedy(MemoryError())
        assert "its server runs" in remedy(*of(errno.ESTALE)) and "right to read" in remedy(*of(errno.EACCES))
        assert remedy(*of(errno.EIO)) == remedy(BadCheckpoint("x")) == remedy(PersistError("x")) == ""
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
