"""Turns errors of a store's client, of which there is no list, into ours that name the remedy."""

import logging
from contextlib import AbstractContextManager
from types import TracebackType

from fastckpt._core.error_codes import coded
from fastckpt._core.io.read_errors import ErrorKind, kind_of, remedy
from fastckpt.errors import FastckptError, PersistError

logger = logging.getLogger("fastckpt")


class ExplainedErrors(AbstractContextManager[None]):
    """Turns any error of a protocol's client, of which there is no list, into a PersistError with the remedy."""

    def __init__(self, deed: str, url: str) -> None:
        self._deed = deed
        self._url = url

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # BaseExceptions such as KeyboardInterrupt pass; our own errors name their remedy already.
        if isinstance(error, Exception) and not isinstance(error, FastckptError):
            text = f"cannot {self._deed} in {self._url}: {type(error).__name__}: {error}. {_remedy(error)}."
            raise PersistError(coded(text, "FC-022")) from error


class LoggedErrors(AbstractContextManager[bool]):
    """Goes on after an error, and logs it."""

    def __init__(self, deed: str) -> None:
        self._deed = deed

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            logger.warning("cannot %s: %s: %s", self._deed, type(error).__name__, error)
        return isinstance(error, Exception)


def _remedy(error: Exception) -> str:
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return "Give this user the right to list, read, write and delete there, and see that its credentials are found"
    if isinstance(error, FileNotFoundError) and error.filename is None:  # else it is one of ours on this host
        return "Make the bucket, or correct the URL"
    if kind_of(error) is ErrorKind.NO_ROOM:
        return remedy(error)
    return "See whether the store can be reached; a persist is tried again"
