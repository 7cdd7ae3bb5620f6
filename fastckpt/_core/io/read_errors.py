"""Verdicts on read errors: the meaning of each for the checkpoint that was read. One table for all readers.

Only damage is a reason to take an older checkpoint in place of a newer one, and to reject the newer one.
"""

import errno
import os
import resource
from collections.abc import Iterable
from enum import Enum

from fastckpt.errors import ArenaTooSmall, BadCheckpoint, FastckptError, PersistError

EJUKEBOX = 528
"""Error number of NFS, without a name in Python: the server asks to try again later."""
LONGEST = 700
"""Characters of an error in words."""


class ReadVerdict(Enum):
    """Verdict on a checkpoint after an error.

    DAMAGE: The bytes are not there, or not those that were saved. An older checkpoint is taken.
    NO_ANSWER: Nothing. The same save is taken from another tier, or it is tried again; else that is an error.
    USERS_MISTAKE: The bytes are there, and this script, or a library, does not load them. An older checkpoint is taken,
        and this one is left as it is, for good.
    """

    DAMAGE = "damage"
    NO_ANSWER = "no answer"
    USERS_MISTAKE = "the user's mistake"


class Phase(Enum):
    """The phases of a load."""

    LISTING = "listing"
    OPENING = "opening"
    READING = "reading"
    UNPICKLING = "unpickling"
    APPLYING = "applying"


class ErrorKind(Enum):
    """The kinds of errors of reading, each with the errors of the system that are of it."""

    NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO)
    NO_ROOM = (
        errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ENOLCK, errno.EBADF,
        errno.ENOSPC, errno.EDQUOT,
    )  # fmt: skip
    SILENT = (
        errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN,
        errno.ENETUNREACH, errno.ENETRESET, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ESHUTDOWN,
        errno.EPIPE, errno.ENODEV, errno.EINTR, errno.EBUSY, errno.EREMOTEIO, errno.ECOMM, errno.ENOLINK, errno.ENONET,
        errno.EPROTO, errno.ECANCELED, EJUKEBOX,
    )  # fmt: skip
    DENIED = (errno.EACCES, errno.EPERM, errno.ENOKEY, errno.EKEYEXPIRED, errno.EKEYREVOKED, errno.EKEYREJECTED)
    UNREADABLE = (errno.EIO, errno.EUCLEAN)
    DIFFERENT = ("a digest or a size that differs",)
    UNLOADABLE = ("what a loader raises",)


_D, _N, _U = ReadVerdict.DAMAGE, ReadVerdict.NO_ANSWER, ReadVerdict.USERS_MISTAKE
TABLE: dict[ErrorKind, tuple[ReadVerdict, ReadVerdict, ReadVerdict, ReadVerdict, ReadVerdict]] = {
    # listing, opening, reading, unpickling, applying
    ErrorKind.NOT_THERE: (_D, _D, _D, _D, _D),
    ErrorKind.NO_ROOM: (_N, _N, _N, _N, _N),
    ErrorKind.SILENT: (_N, _N, _N, _N, _N),
    ErrorKind.DENIED: (_N, _N, _N, _N, _N),  # a ticket that has expired, or one host's mount, as often as a wrong mode
    ErrorKind.UNREADABLE: (_D, _D, _D, _D, _D),
    ErrorKind.DIFFERENT: (_D, _D, _D, _D, _D),
    ErrorKind.UNLOADABLE: (_D, _D, _D, _U, _U),
}
IN_TIER = {
    ("memory", ErrorKind.DENIED): ReadVerdict.DAMAGE,  # nothing that we have written there is closed to us
    ("peer", ErrorKind.SILENT): ReadVerdict.DAMAGE,  # a lost node has taken with it files that it alone had
}
"""Verdicts in one tier, of `policy.resume.TIERS`, in place of those of the table."""

_TYPES = (
    (ErrorKind.DIFFERENT, BadCheckpoint),
    (ErrorKind.NO_ROOM, (MemoryError, ArenaTooSmall)),
    (ErrorKind.SILENT, (PersistError, TimeoutError, ConnectionError)),
    (ErrorKind.UNREADABLE, OSError),
)
_KINDS = {number: kind for kind in ErrorKind for number in kind.value if isinstance(number, int)}
# Longest first: one text may begin with another. RuntimeErrors of torch have them, of its allocator and its mappings.
_TEXTS = sorted(((os.strerror(number), number) for number in _KINDS), key=lambda text: -len(text[0]))
_NO_MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate",
    "can't start new thread",
    "memoryerror",
    "too many open files",
)
_REMEDIES = {
    ErrorKind.NO_ROOM: "This process finds no memory for it: {memory}. Free some, or raise the limit",
    ErrorKind.SILENT: "What holds it does not answer: see that its server runs, and that it is mounted",
    ErrorKind.DENIED: "Give this user the right to read it, or move it out of this directory",
}


def verdict(error: BaseException, phase: Phase, tier: str = "storage") -> ReadVerdict:
    """Return the verdict on a checkpoint in one of the `TIERS`, after an error in this phase of a load."""
    parts = _parts(error)
    if parts:  # of several ranks, as torch.distributed.checkpoint raises
        return worst(verdict(part, phase, tier) for part in parts)
    kind = kind_of(error)
    return IN_TIER.get((tier, kind)) or TABLE[kind][list(Phase).index(phase)]


def worst(verdicts: Iterable[ReadVerdict]) -> ReadVerdict:
    """The verdict of several: a checkpoint that is damaged for one cannot come to be whole; a silent one may."""
    return min(verdicts, key=list(ReadVerdict).index)


def kind_of(error: BaseException) -> ErrorKind:
    """The kind of an error, by its number, its type, or for errors without these its text."""
    if isinstance(error, OSError) and error.errno is not None:
        return _KINDS.get(error.errno, ErrorKind.UNREADABLE)
    if type(error).__name__ == "OutOfMemoryError":  # torch's: policies know no torch
        return ErrorKind.NO_ROOM
    for kind, types in _TYPES:
        if isinstance(error, types):
            return kind
    if any(phrase in str(error).lower() for phrase in _NO_MEMORY):
        return ErrorKind.NO_ROOM  # also of a loader that could not open a library
    of_text = _kind_of_text(str(error)) if isinstance(error, RuntimeError | FastckptError) else None
    # Other errors of ours: such as memory of other nodes that is gone.
    return of_text or (ErrorKind.NOT_THERE if isinstance(error, FastckptError) else ErrorKind.UNLOADABLE)


def _kind_of_text(text: str) -> ErrorKind | None:
    return next((_KINDS[number] for each, number in _TEXTS if each in text), None)


def in_words(error: BaseException) -> str:
    """An error with its remedy, in a line for a log and for other ranks."""
    text = f"{type(error).__name__}: {error}"[:LONGEST]
    return f"{text}. {found}" if (found := remedy(error)) else text


def remedy(error: BaseException) -> str:
    """Return the remedy for an error that is no verdict, with the limit that was met; empty for other errors."""
    error = next(iter(_parts(error)), error)
    if isinstance(error, FastckptError):
        return ""  # it names its own
    number = error.errno if isinstance(error, OSError) else None
    files = os.strerror(errno.EMFILE)
    if number == errno.ENFILE or os.strerror(errno.ENFILE) in str(error):
        return "The host has as many open files as it may (fs.file-max): raise that"
    if number == errno.EMFILE or files in str(error):
        return f"This process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files open: raise ulimit -n"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    free = "see the host's free memory, that of its /dev/shm, and the limit of its cgroup"
    memory = free if limit == resource.RLIM_INFINITY else f"ulimit -v allows it {limit} bytes of addresses"
    return _REMEDIES.get(kind_of(error), "").format(memory=memory)


def _parts(error: BaseException) -> list[BaseException]:
    """The errors of ranks in one of torch.distributed.checkpoint, a BaseException with these by rank."""
    failures = getattr(error, "failures", None)
    found = failures.values() if isinstance(failures, dict) else ()
    return [each[0] for each in found if isinstance(each, tuple) and each and isinstance(each[0], BaseException)]
