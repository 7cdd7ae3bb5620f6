"""An fsspec file system at a URL: each request has a deadline, and is told of while it has no answer."""

from contextlib import AbstractContextManager
from typing import Any

import fsspec
import fsspec.asyn
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from fastckpt.errors import ConfigError
from fastckpt.storage.waiting import Waiting

REQUEST_DEADLINE = 20.0
"""Seconds for a request, with all retries of the client: one that is given no answer is made once more."""
SLOWEST = 16 * 2**20 / 100
"""Bytes a second: a request that carries many has a second more for each so many."""
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci"})
"""Protocols whose first part is a bucket that exists or does not, and which have no directories to be made."""


class Client:
    """What opens a URL.

    Attributes:
        url: The URL.
        root: The same as fsspec has it, without the protocol.
        is_s3: Whether it is of S3.
        has_buckets: Whether objects lie in buckets, without directories.
    """

    def __init__(self, url: str) -> None:
        """Raise ConfigError if nothing that is installed opens such a URL."""
        try:
            # What a listing was a while ago tells nothing; and a client of its own has the environment's settings.
            self.fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"cannot open {url}: {error}. Install the fsspec implementation of that protocol; for s3:// that is "
                "pip install 's3fs>=2024.6'. Or correct the URL, such as s3://bucket/run1."
            ) from error
        self.url, self.root = url.rstrip("/"), root.rstrip("/")
        names = {self.fs.protocol} if isinstance(self.fs.protocol, str) else set(self.fs.protocol)
        self.is_s3 = bool(names & {"s3", "s3a"})
        self.has_buckets = bool(names & BUCKETS)
        self._waiting = Waiting(self.url)

    def ask(self, deed: str, method: str, *arguments: Any, size: int = 0, limit: float = 0.0, **options: Any) -> Any:
        """What a method of the file system returns.

        Args:
            deed: What it does, in words that follow "to".
            method: Its name.
            *arguments: Its arguments.
            size: Bytes that travel.
            limit: Seconds that it may take; 0 for what follows from the size.
            **options: Its keyword arguments.

        Raises TimeoutError if there is no answer in time; else whatever the protocol's client raises.
        """
        seconds = limit or REQUEST_DEADLINE + size / SLOWEST
        deed = deed.replace(f"{self.root}/", "")
        timed = self.fs.async_impl  # others than asynchronous clients have deadlines of their own only
        try:
            with self._waiting.request(deed, seconds if timed else None):
                return getattr(self.fs, method)(*arguments, **options, **({"timeout": seconds} if timed else {}))
        except fsspec.asyn.FSTimeoutError as error:
            raise TimeoutError(f"no answer in {seconds:.0f} s (to {deed})") from error

    def told(self, deed: str) -> AbstractContextManager[None]:
        """A request that has no deadline but its client's own is on its way for as long as this lasts."""
        return self._waiting.request(deed, None)

    def has_its_own(self, method: str) -> bool:
        """Whether the file system does not inherit a method from fsspec's base classes."""
        name = f"_{method}" if self.fs.async_impl else method
        found = getattr(type(self.fs), name)
        return all(found is not vars(base).get(name) for base in (AbstractFileSystem, AsyncFileSystem))

    def close(self) -> None:
        """End the connections."""
        if self.is_s3 and self.fs._s3 is not None:  # else they stay until the garbage is collected
            fsspec.asyn.sync(self.fs.loop, self.fs._s3.close, timeout=REQUEST_DEADLINE)
