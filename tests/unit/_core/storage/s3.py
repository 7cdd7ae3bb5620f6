"""A real S3 server on a loopback port, which answers wrongly, late or never when a test says so."""

import io
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.request import Request, urlopen

import fsspec.asyn
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

BUCKET = "bucket"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>as the test says</Message></Error>"
CODES = {500: "InternalError", 503: "SlowDown", 403: "AccessDenied", 501: "NotImplemented"}


@dataclass
class Fault:
    """A failure of requests whose verb and path match.

    Attributes:
        how: "drop" before the request is carried out, "lose" its answer, a status to answer with, "cut" the answer's
            body in half, "flip" a byte of it, "stall" for 0.5 s, "hang" until the test ends.
        after: Requests that match and pass first.
        times: How many requests fail; with ``every``, each request of that ordinal does.
    """

    how: str | int
    verb: str = ".*"
    path: str = ".*"
    after: int = 0
    times: int = 1
    every: int = 0
    injected: int = 0
    seen: int = 0

    def applies(self, verb: str, path: str) -> bool:
        if not (re.fullmatch(self.verb, verb) and re.search(self.path, path)):
            return False
        self.seen += 1
        applies = self.seen % self.every == 0 if self.every else self.after < self.seen <= self.after + self.times
        self.injected += applies
        return applies


class Quiet(MotoRequestHandler):
    """Logs no requests, and reads the whole body before the answer, as a client may wait for that."""

    def log(self, *_: object) -> None:
        pass

    def connection_dropped(self, *_: object) -> None:
        self.close_connection = True

    def make_environ(self) -> dict[str, Any]:
        found = super().make_environ()
        return found | {"wsgi.input": io.BytesIO(self.rfile.read(int(found.get("CONTENT_LENGTH") or 0)))}


class S3:
    """A server as tests see it.

    Attributes:
        faults: What fails.
        requests: Verb and path of each request.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self._backend = DomainDispatcherApplication(create_backend_app)
        self._turn, self._over = threading.Lock(), threading.Event()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self.url = f"http://127.0.0.1:{self._server.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self._fs: Any = None

    def inject(self, *faults: Fault) -> Fault:
        self.faults += faults
        return faults[0]

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        verb, path = environ["REQUEST_METHOD"], environ["RAW_URI"]
        with self._turn:
            self.requests.append((verb, path))
            how = next((fault.how for fault in self.faults if fault.applies(verb, path)), "")
        if isinstance(how, int):
            start(f"{how} {CODES[how]}", [("Content-Type", "application/xml")])
            return [ERROR.format(CODES[how]).encode()]
        if how == "hang":
            self._over.wait()
        if how in ("drop", "hang"):
            raise ConnectionAbortedError
        if how == "stall":
            time.sleep(0.5)
        data = b"".join(self._backend(environ, start))
        if how == "lose":
            raise ConnectionAbortedError
        if how == "flip":
            data = bytes([data[0] ^ 1]) + data[1:]
        return [data[: len(data) // 2] if how == "cut" else data]

    @property
    def fs(self) -> Any:
        """A client of the test's own."""
        if self._fs is None:
            self._fs = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
        return self._fs

    def objects(self) -> dict[str, int]:
        """All objects and their sizes."""
        return {key: info["size"] for key, info in self.fs.find(BUCKET, detail=True).items()}

    def uploads(self) -> list[str]:
        """The keys of uploads under way."""
        return [upload["Key"] for upload in self.fs.list_multipart_uploads(BUCKET)]

    def begin(self) -> None:
        """Have one empty bucket, and no faults."""
        self._over.clear()
        for verb, path in (("POST", "/moto-api/reset"), ("PUT", f"/{BUCKET}")):
            urlopen(Request(self.url + path, method=verb)).close()
        self.requests.clear()

    def end(self) -> None:
        """Let go of who hangs."""
        self.faults.clear()
        self._over.set()
        if self._fs is not None and self._fs._s3 is not None:
            fsspec.asyn.sync(self._fs.loop, self._fs._s3.close)
        self._fs = None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    """The server, which lives as long as the tests of this process."""
    fsspec.asyn.get_loop()  # lives as long as this process, too
    server = S3()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """An empty bucket, which takes uploads of small parts; credentials and address are in the environment."""
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 0)
    for name, value in (CREDENTIALS | {"AWS_ENDPOINT_URL": s3_server.url}).items():
        monkeypatch.setenv(name, value)
    s3_server.begin()
    yield s3_server
    s3_server.end()
