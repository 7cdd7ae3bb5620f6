"""The records of histories at a URL: objects made by conditional requests, or in directories that are made once."""

import errno
from collections.abc import Collection

from fastckpt._core.error_codes import coded
from fastckpt._core.storage.history import LARGEST_TEXT, Record, number_of, outdated
from fastckpt._core.storage.local.layout import PRIVATE
from fastckpt._core.storage.remote.client_errors import ExplainedErrors
from fastckpt._core.storage.remote.objects import Creation, Objects
from fastckpt.errors import ConfigError


class ObjectHistories:
    """Histories at a URL: objects that are made by conditional requests, or are in directories that are."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    @property
    def excludes(self) -> bool:
        """See `Histories`."""
        return self._objects.creation is not Creation.NONE

    def newest(self, *, fresh: bool = True) -> int:
        """See `Histories`."""
        with ExplainedErrors("look for histories", self._objects.url()):
            return max(map(number_of, self._objects.names(PRIVATE)), default=0)

    def read(self, history: int) -> Record | None:
        """See `Histories`."""
        with ExplainedErrors("read a history's record", self._objects.url()):
            text = self._objects.read(self._name(history), LARGEST_TEXT)
            if text is None and self._objects.creation is Creation.DIRECTORY and self.newest() == history:
                return Record.from_bytes(history, b"")  # its holder is about to write it, or has died before
            return None if text is None else Record.from_bytes(history, text)

    def create(self, record: Record) -> bool:
        """See `Histories`. A store that does not know such requests carries out the second one as well."""
        with ExplainedErrors("open a history", self._objects.url()):
            if self._objects.creation is Creation.DIRECTORY:
                # Servers without conditional requests still refuse to make a directory twice: the directory is the
                # lock, and the record in it is written by its winner alone.
                if made := self._objects.create_directory(f"{PRIVATE}/history-{record.history}"):
                    self._objects.put(self._name(record.history), record.to_bytes())
                return made
            try:
                made = self._objects.create(self._name(record.history), record.to_bytes())
                # A store that ignores the condition would let every job
                # win: created twice means that it does not know it.
                if not made or not self._objects.create(self._name(record.history), record.to_bytes()):
                    return made
                fault = "makes an object twice that was to be made once"
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
                fault = f"does not know conditional requests ({error})"
            raise ConfigError(
                coded(
                    f"{self._objects.url()} {fault}: two jobs that save there cannot be told apart. Use a store that "
                    "knows If-None-Match (AWS S3 does), or accept that with --fast-no-exclusive.",
                    "FC-013",
                )
            )

    def write(self, record: Record) -> None:
        """See `Histories`."""
        with ExplainedErrors("renew a history", self._objects.url()):
            self._objects.put(self._name(record.history), record.to_bytes())

    def forget(self, needed: Collection[int]) -> list[str]:
        """See `Histories`."""
        with ExplainedErrors("remove old records of histories", self._objects.url()):
            histories = outdated(map(number_of, self._objects.names(PRIVATE)), needed)
            names = [f"{PRIVATE}/history-{history}" for history in histories]
            if self._objects.creation is Creation.DIRECTORY:
                for name in names:
                    self._objects.remove_all(name)
            else:
                list(self._objects.each(self._objects.remove, names))
            return names

    def _name(self, history: int) -> str:
        inner = "/record" * (self._objects.creation is Creation.DIRECTORY)
        return f"{PRIVATE}/history-{history}{inner}"
