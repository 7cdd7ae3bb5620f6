"""An fsspec file system at a URL: each request has a deadline, and is logged while it has no answer."""

from contextlib import AbstractContextManager
from typing import Any

import fsspec
import fsspec.asyn
import fsspec.config
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.spec import AbstractFileSystem

from fastckpt._core.storage.remote.wait_notice import WaitNotice
from fastckpt.errors import ConfigError

REQUEST_DEADLINE = 20.0
"""Seconds for a request, with all retries of the client: one that is given no answer is made once more."""
SLOWEST = 16 * 2**20 / 100
"""Bytes a second: a request that carries many has a second more for each so many."""
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci"})
"""Protocols of stores with buckets, which exist or do not, and without directories to be made."""
REMEDY = (
    "Install the fsspec implementation of that protocol; for s3:// that is pip install 's3fs>=2024.6'. Or correct the "
    "URL, such as s3://bucket/run1."
)
REMEDIES = {
    "webdav": "pip install webdav4, and name the server in the environment: "
    """FSSPEC_WEBDAV='{"base_url": "https://host/dav", "auth": ["user", "password"]}'; what follows webdav:// is a """
    "path there.",
    "hdfs": "pip install pyarrow, and let it find libhdfs and Java: set JAVA_HOME, HADOOP_HOME, and CLASSPATH to what "
    "'hadoop classpath --glob' prints.",
}
LONGEST_REASON = 300
"""Characters of a client's message that are passed on: Arrow names all places where it looked for Java."""
_INSTEAD = "Take s3://, webdav:// or another store, or mount it and give the directory"
REFUSED = {
    "ftp": f"what fsspec has for FTP makes one request at a time. {_INSTEAD}.",
    "http": f"over HTTP nothing can be written. {_INSTEAD}.",
    "https": f"over HTTP nothing can be written. {_INSTEAD}.",
    "sftp": f"what fsspec has for SFTP makes one request at a time, and copies nothing. {_INSTEAD}, as sshfs does.",
    "ssh": f"what fsspec has for SFTP makes one request at a time, and copies nothing. {_INSTEAD}, as sshfs does.",
}


class RemoteFilesystem:
    """Client of the file system at a URL.

    Attributes:
        url: The URL.
        root: The same as fsspec has it, without the protocol.
        names: The protocols that it is for.
        is_s3: True if it is of S3.
        reading: Options for requests that read parts of files.
        has_buckets: True if objects are in buckets, without directories.
    """

    def __init__(self, url: str) -> None:
        """Raise ConfigError if nothing that is installed opens such a URL."""
        self.url = url.rstrip("/")
        self.fs, root = _open(url)
        self.root = root.rstrip("/")
        self.names = names = {self.fs.protocol} if isinstance(self.fs.protocol, str) else set(self.fs.protocol)
        self.is_s3 = bool(names & {"s3", "s3a"})
        self._is_webdav = "webdav" in names
        self.has_buckets = bool(names & BUCKETS)
        self.reading = {"seekable": True} if isinstance(self.fs, ArrowFSWrapper) else {}
        self._waiting = WaitNotice(self.url)

    def ask(self, deed: str, method: str, *arguments: Any, size: int = 0, limit: float = 0.0, **options: Any) -> Any:
        """Return the result of a method of the file system.

        Args:
            deed: Description of the call, in words that follow "to".
            method: Its name.
            *arguments: Its arguments.
            size: Bytes that travel.
            limit: Seconds that it may take; 0 for a limit that follows from the size.
            **options: Its keyword arguments.

        Raises TimeoutError if there is no answer in time; else any error of the protocol's client.
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
        """Return whether the file system implements a method itself; False if it is of fsspec's base classes."""
        name = f"_{method}" if self.fs.async_impl else method
        found = getattr(type(self.fs), name)
        # fsspec's base classes implement some methods by others, in ways that lose errors.
        return all(found is not vars(base).get(name) for base in (AbstractFileSystem, AsyncFileSystem))

    def close(self) -> None:
        """End the connections."""
        if self.is_s3 and self.fs._s3 is not None:  # else they stay until the garbage is collected
            fsspec.asyn.sync(self.fs.loop, self.fs._s3.close, timeout=REQUEST_DEADLINE)
        if self._is_webdav:
            self.fs.client.http.close()


def _open(url: str) -> tuple[Any, str]:
    """A file system of our own, with the environment's settings, and the path in it."""
    protocol = url.partition("://")[0]
    if protocol in REFUSED:
        raise ConfigError(f"cannot keep checkpoints at {url}: {REFUSED[protocol]}")
    try:
        return _made(url, protocol)
    except (ImportError, ValueError, TypeError, OSError) as error:
        if isinstance(error, OSError) and protocol != "hdfs":  # which looks for Java; others cannot be reached now
            raise
        text = str(error)[:LONGEST_REASON]
        raise ConfigError(f"cannot open {url}: {text}. {REMEDIES.get(protocol, REMEDY)}") from error


def _made(url: str, protocol: str) -> tuple[Any, str]:
    # fsspec shares instances by their arguments: other uses of one in this process would affect ours.
    options: dict[str, Any] = {"skip_instance_cache": True}
    if protocol not in ("webdav", "dav"):  # which keeps no listings, and refuses the option
        options["use_listings_cache"] = False  # an old one proves nothing
    if isinstance(auth := fsspec.config.conf.get(protocol, {}).get("auth"), list):
        options["auth"] = tuple(auth)  # JSON has no tuples
    made: tuple[Any, str] = fsspec.core.url_to_fs(url, **options)
    return made
