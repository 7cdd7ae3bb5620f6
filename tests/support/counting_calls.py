"""Counts calls of this process on the files below a directory."""

import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_AUDITED = {"open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link"}
_NOT_AUDITED = ("stat", "lstat", "access", "statvfs", "readlink")


class FileCalls:
    """Calls of all threads that name a path below a directory, from its making on.

    Attributes:
        made: How many there were, by kind and path.
    """

    def __init__(self, directory: Path) -> None:
        self.made: Counter[tuple[str, str]] = Counter()
        self._below, self._turn, self._counts = str(directory), threading.Lock(), True
        self._opened = threading.local()
        sys.addaudithook(self._audit)  # which stays for good
        for name in _NOT_AUDITED:
            setattr(os, name, self._counting(name, getattr(os, name)))

    def stop(self) -> None:
        self._counts = False

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._counts or event not in _AUDITED or not arguments:
            return
        is_opener = event == "open" and arguments[1] is None and arguments[0] == getattr(self._opened, "path", None)
        self._opened.path = str(arguments[0]) if event == "open" and arguments[1] is not None else None
        if not is_opener:  # of a call that was counted
            self._count(event, arguments[0])

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(path: Any, *arguments: Any, **options: Any) -> Any:
            if self._counts:
                self._count(name, path)
            return function(path, *arguments, **options)

        return counted

    def _count(self, kind: str, path: Any) -> None:
        if isinstance(path, str | os.PathLike) and str(path).startswith(self._below):
            with self._turn:
                self.made[kind, str(path)] += 1
