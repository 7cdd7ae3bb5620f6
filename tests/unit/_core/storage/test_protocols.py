"""Protocols besides S3, each with a real server or file system where there is one, and those that are refused.

What most need is in an environment of its own: make stores.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import fsspec
import fsspec.asyn
import fsspec.config
import pytest
from fsspec.implementations.arrow import ArrowFSWrapper

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.remote.remote_store import RemoteStore
from fastckpt._core.storage.store import open_store
from fastckpt.errors import ConfigError
from tests.support.ports import free_port
from tests.support.tables import for_each

WEBDAV = """
import sys
from cheroot import wsgi
from wsgidav.wsgidav_app import WsgiDAVApp
users = {"*": {"user": {"password": "secret"}}}
login = {"accept_basic": True, "accept_digest": False, "default_to_digest": False}
options = {"provider_mapping": {"/": sys.argv[2]}, "simple_dc": {"user_mapping": users}, "http_authenticator": login}
wsgi.Server(("127.0.0.1", int(sys.argv[1])), WsgiDAVApp(options | {"verbose": 0})).start()
"""
GCS = """
import sys
from gcp_storage_emulator.server import create_server
create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket="bucket").run()
"""


class ByArrow(ArrowFSWrapper):
    """What fsspec has for hdfs://, over a file system of Arrow that is here."""

    protocol = "arrow-here"

    def __init__(self, **options):
        from pyarrow.fs import LocalFileSystem

        super().__init__(LocalFileSystem(), **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("arrow-here://").rstrip("/")


fsspec.register_implementation("arrow-here", ByArrow, clobber=True)
fsspec.asyn.get_loop()  # lasts, once it is there


@for_each(
    ("ftp://host/run", r"FTP makes one request at a time\. Take s3://, webdav://"),
    ("sftp://host/run", r"SFTP makes one request at a time, and copies nothing\. .* mount it .* sshfs"),
    ("ssh://host/run", "sshfs"),
    ("https://host/run", "nothing can be written"),
    ("webdav://run", r"FSSPEC_WEBDAV='\{\"base_url\": "),
    ("hdfs://nowhere/run", "CLASSPATH to what 'hadoop classpath --glob' prints"),
)
def test_a_protocol_that_cannot_be_opened_names_those_that_can(url: str, why: str):
    with pytest.raises(ConfigError, match=why):
        open_store(url)


AZURITE = Path(sys.prefix, "azurite/node_modules/.bin/azurite-blob")
"""Microsoft's emulator of Azure's blob storage, which `make stores` installs where there is npm."""
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of its only account, as its manual gives it."""


@contextmanager
def serving(command: Callable[[int], list[str]]) -> Iterator[int]:
    port = free_port()
    server = subprocess.Popen(command(port))
    try:
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert server.poll() is None and time.monotonic() < end
                time.sleep(0.1)
        yield port
    finally:
        server.terminate()
        server.wait()


@contextmanager
def azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A container in Azure's own emulator."""
    if not AZURITE.exists():
        pytest.skip(f"no Azurite in {AZURITE}: it is installed with npm")
    options = ["--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    with serving(lambda port: [str(AZURITE), *options, "--blobHost", "127.0.0.1", "--blobPort", str(port)]) as port:
        place = f"http://127.0.0.1:{port}/devstoreaccount1"
        account = f"AccountName=devstoreaccount1;AccountKey={AZURE_KEY};BlobEndpoint={place};"
        monkeypatch.setitem(
            fsspec.config.conf, "abfs", {"connection_string": f"DefaultEndpointsProtocol=http;{account}"}
        )
        fsspec.filesystem("abfs").mkdir("bucket")
        yield "abfs://bucket/run"


@pytest.fixture(params=["webdav", "gs", "abfs", "arrow"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "arrow":
        yield f"arrow-here://{tmp_path}/far/run"
        return
    if request.param == "abfs":
        with azure(monkeypatch) as place:
            yield place
        return
    (served := tmp_path / "served").mkdir()
    program = {"webdav": WEBDAV, "gs": GCS}[request.param]
    with serving(lambda port: [sys.executable, "-c", program, str(port), str(served)]) as port:
        login = {"base_url": f"http://127.0.0.1:{port}", "auth": ["user", "secret"]}
        monkeypatch.setitem(fsspec.config.conf, "webdav", login)
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        yield {"webdav": "webdav://far/run", "gs": "gs://bucket/run"}[request.param]


@pytest.mark.stores
def test_a_store_of_each_protocol_publishes_lists_and_deletes(url: str, tmp_path: Path):
    """A model that travels in several parts; readers meanwhile."""
    model, own = tmp_path / "model.pt", tmp_path / "rank_0.pt"
    model.write_bytes(os.urandom(40_000_000))
    own.write_bytes(b"own")
    with closing(RemoteStore(url)) as store, closing(RemoteStore(url)) as reader, ThreadPoolExecutor(4) as pool:
        assert reader.checkpoints() == [] and store.mark("1" * 32) == "1" * 32 == reader.identity().mark
        for step in (10, 20, 30):
            target = "best.pt" if step == 20 else ""
            store.publish(PublishRequest(SaveId(1, step), {"model.pt": model, "rank_0.pt": own}, target=target))
        for found in [pool.submit(reader.checkpoints) for _ in range(12)]:
            assert [stored.id.step for stored in found.result(60)] == [30, 20, 10]
        newest, middle, _ = reader.checkpoints()
        assert reader.scan().damaged == [] and middle.path == f"{url}/best.pt"
        reader.fetch(newest, ["model.pt", "rank_0.pt"], tmp_path / "into")
        assert (tmp_path / "into/model.pt").read_bytes() == model.read_bytes()
        part = slice(17_000_000, 17_000_100)
        assert reader._objects.read_range("best.pt", part.start, part.stop) == model.read_bytes()[part]
        store.delete(SaveId(1, 10))
        store.quarantine(newest, "a reason")
        assert [stored.id.step for stored in reader.checkpoints()] == [20]
        store._objects.put("checkpoint-5/0-ffffffff-000000000000/model.pt", b"theirs")
        assert reader.sweep() == [], "it is another host's"
        assert time.time() - reader._objects.written_at("checkpoint-5/0-ffffffff-000000000000/model.pt") < 3600
