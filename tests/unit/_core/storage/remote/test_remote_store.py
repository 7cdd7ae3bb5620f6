"""A store at a URL: which checkpoints count, and that none is lost or mixed, whatever request fails."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.remote import filesystem as client_module
from fastckpt._core.storage.remote import objects as objects_module
from fastckpt._core.storage.remote import upload
from fastckpt._core.storage.remote.remote_store import RemoteStore
from fastckpt._core.storage.store import normalised, open_store, target_in
from fastckpt.errors import BadCheckpoint, ConfigError, PersistError
from tests.unit._core.storage.checkpoints import images
from tests.unit._core.storage.s3 import S3, Fault, s3, s3_server  # noqa: F401 (fixtures)

MIB = 2**20


class Plain(LocalFileSystem):
    """Some other file system that fsspec opens: files in directories, and no multipart uploads."""

    protocol = "plain"


fsspec.register_implementation("plain", Plain, clobber=True)


class Unlisted(Plain):
    """One that cannot list some directories."""

    protocol = "unlisted"
    trouble = re.compile("nothing")

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        if self.trouble.search(path):
            raise OSError(5, "Input/output error", path)
        return super().ls(path, detail, **kwargs)


fsspec.register_implementation("unlisted", Unlisted, clobber=True)


@pytest.fixture(params=["s3", "memory", "plain"])
def store(request: pytest.FixtureRequest, tmp_path: Path, s3_server: str) -> Iterator[RemoteStore]:  # noqa: F811
    """The same store over different protocols."""
    url = {
        "s3": "s3://bucket/run1",
        "memory": f"memory://{tmp_path.name}/run1",
        "plain": f"plain://{tmp_path}/plain/run1",
    }[request.param]
    if request.param == "s3":
        request.getfixturevalue("s3")
    with opened(url) as made:
        yield made


@pytest.fixture
def near(tmp_path: Path) -> Iterator[RemoteStore]:
    """A store that answers at once, for what is decided by names and sizes alone."""
    with opened(f"memory://{tmp_path.name}/run1") as made:
        yield made


@pytest.fixture
def on_s3(s3: S3) -> Iterator[RemoteStore]:  # noqa: F811
    with opened("s3://bucket/run1") as made:
        yield made


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A checkpoint whose model travels in four parts of 5 MiB, the least that S3 takes, and a rest."""
    monkeypatch.setattr(objects_module, "PART", 5 * MIB)
    source = tmp_path / "large"
    source.mkdir()
    (source / "model.pt").write_bytes(os.urandom(20 * MIB + 12345))
    (source / "rank_0.pt").write_bytes(b"own")
    return {name: source / name for name in ("model.pt", "rank_0.pt")}


@contextmanager
def opened(url: str) -> Iterator[RemoteStore]:
    store = RemoteStore(url)
    try:
        yield store
    finally:
        store.close()


def publish(store: RemoteStore, folder: Path, id: SaveId, **options: Any) -> None:
    store.publish(PublishRequest(id, images(folder / f"image-{id.history}-{id.step}", id), **options))


def cleaned(store: RemoteStore) -> None:
    """What a failed publication left is cleaned up in the background."""
    store._objects._cleaner.submit(int).result(60)


def ids(store: RemoteStore) -> list[SaveId]:
    return [stored.id for stored in store.checkpoints()]


def assert_sound(store: RemoteStore, tmp_path: Path) -> list[SaveId]:
    """Every checkpoint that counts is what was saved under its id; returns the ids, newest first."""
    scan = store.scan()
    assert scan.damaged == []
    for stored in scan.places:
        into = tmp_path / f"fetched-{stored.id.history}-{stored.id.step}"
        store.fetch(stored, [entry.name for entry in stored.manifest.files], into)
        if store.files(stored, into)["model.pt"].stat().st_size < MIB:
            assert (into / "model.pt").read_bytes().startswith(b"%d.%d model." % stored.id)
            assert (into / "rank_0.pt").read_bytes() == b"%d.%d rank" % stored.id
    return [stored.id for stored in scan.whole]


# --- what a store does


def test_an_empty_store_lists_no_checkpoints(store):
    assert store.checkpoints() == []
    assert store.sweep() == []


def test_a_published_checkpoint_is_found_and_fetched(store, tmp_path):
    publish(store, tmp_path, SaveId(1, 10), parent=SaveId(0, 7), details={"threads": 3})
    publish(store, tmp_path, SaveId(1, 20))
    assert assert_sound(store, tmp_path) == [(1, 20), (1, 10)]
    with opened(store.path) as another:
        oldest = another.checkpoints()[1]
    assert (oldest.manifest.parent, oldest.manifest.details, oldest.manifest.world_size) == ((0, 7), {"threads": 3}, 1)
    assert re.fullmatch(re.escape(store.path) + "/checkpoint-10/1-[0-9a-f]{8}-[0-9a-f]{12}", oldest.path)
    assert store._objects.read("latest_checkpointed_iteration.txt", 9) == b"20"


def test_a_large_file_is_uploaded_in_parts(store, large, tmp_path):
    store.publish(PublishRequest(SaveId(0, 1), large))
    stored = store.checkpoints()[0]
    store.fetch(stored, ["model.pt"], tmp_path / "into")
    store.verify(stored)
    assert (tmp_path / "into/model.pt").read_bytes() == large["model.pt"].read_bytes()
    assert list((tmp_path / "into").iterdir()) == [tmp_path / "into/model.pt"]


def test_a_step_of_a_later_history_replaces_that_of_an_earlier_one(store, tmp_path):
    publish(store, tmp_path, SaveId(1, 10))
    publish(store, tmp_path, SaveId(2, 10))
    assert assert_sound(store, tmp_path) == [(2, 10)]
    publish(store, tmp_path, SaveId(1, 10))  # one that comes late takes nothing's place
    assert assert_sound(store, tmp_path) == [(2, 10), (1, 10)]


def test_a_store_caches_no_manifests_of_deleted_checkpoints(near, tmp_path):
    """An agent may publish for months."""
    for step in range(1, 6):
        publish(near, tmp_path, SaveId(0, step))
        for stored in near.checkpoints()[1:]:
            near.delete(stored.id)
    assert ids(near) == [SaveId(0, 5)]
    assert len(near._catalog._manifests) == 1


def test_delete_removes_all_but_the_newest(store, tmp_path):
    for step in (10, 20):
        publish(store, tmp_path, SaveId(0, step), target=f"named/{step}.pt")
    store.delete(SaveId(0, 15))
    store.delete(SaveId(0, 10))
    assert assert_sound(store, tmp_path) == [(0, 20)]
    assert [name for name in store._objects.sizes("") if "10" in name.split("-")[0] + name[-5:]] == []
    with pytest.raises(ConfigError, match="newest of 1 whole"):
        store.delete(SaveId(0, 20))
    assert "named/20.pt" in store._objects.sizes("")


def test_a_path_of_the_user_at_a_url_is_a_copy_of_the_model(store, tmp_path):
    for step in (10, 20):
        publish(store, tmp_path, SaveId(0, step), target="best/model.pt")
    assert store._objects.read("best/model.pt", 10) == b"0.20 model"
    assert [stored.path for stored in store.checkpoints()] == [store.path + "/best/model.pt"] * 2
    store.delete(SaveId(0, 10))
    assert store._objects.read("best/model.pt", 10) == b"0.20 model", "it is the newer one's"
    assert assert_sound(store, tmp_path) == [(0, 20)]


def test_a_copy_elsewhere_is_its_users_and_stays(near, tmp_path):
    """A manifest may name any object of the bucket."""
    elsewhere = f"{near.path.rsplit('/', 1)[0]}/elsewhere/model.pt"
    for step in (10, 20):
        publish(near, tmp_path, SaveId(0, step), target=elsewhere if step == 10 else "")
    near.delete(SaveId(0, 10))
    assert assert_sound(near, tmp_path) == [(0, 20)]
    assert near._objects.read(near._objects.name(elsewhere), 10) == b"0.10 model"


def test_a_step_saved_to_two_paths_is_at_both(near, tmp_path):
    for path in ("a.pt", "b.pt", "b.pt"):
        publish(near, tmp_path, SaveId(0, 10), target=path)
    assert sorted(stored.path for stored in near.scan().places) == [f"{near.path}/a.pt", f"{near.path}/b.pt"]
    assert len(near.checkpoints()) == 1


@pytest.mark.parametrize("target", ["checkpoint-1/0-00000000-000000000000/model.pt", ".fastckpt/x", "a/../../x", ""])
def test_paths_that_would_tear_something_are_refused(near, tmp_path, target):
    with pytest.raises((ConfigError, BadCheckpoint)):
        publish(near, tmp_path, SaveId(0, 1), target=target or "latest_checkpointed_iteration.txt")
    assert near.checkpoints() == []


def test_the_identity_of_a_store_lasts_as_long_as_its_location(store):
    first, second = "1" * 32, "2" * 32
    assert store.identity() == ("", 0), "who only looks marks nothing"
    assert store.mark(first) == first
    with opened(store.path) as another:
        assert another.mark(second) == first and another.identity() == (first, 0)
    store._objects.remove_all(".fastckpt")
    assert store.identity() == ("", 0)
    assert store.mark(second) == second


@pytest.mark.parametrize("torn", [b"", b"123"])
def test_a_truncated_identity_mark_of_a_store_does_not_count(store, torn):
    store._objects.put(".fastckpt/identity", torn)
    assert store.identity() == ("", 0)
    assert store.mark("1" * 32) == "1" * 32 == store.identity().mark


# --- the reader's rule


def objects_of(store: RemoteStore, step: int) -> tuple[str, dict[str, int]]:
    return f"checkpoint-{step}", store._objects.sizes(f"checkpoint-{step}")


def spoil(store: RemoteStore, step: int, name: str, how: str) -> str:
    """Damage a file of the checkpoint of a step; returns its object's name."""
    folder, sizes = objects_of(store, step)
    found = next(f"{folder}/{inner}" for inner in sizes if inner.endswith(name))
    content = store._objects.read(found, 10**9)
    store._objects.remove(found)
    spoiled = {"short": content[:-1], "empty": b"", "flipped": content[:-1] + bytes([content[-1] ^ 1])}
    if how != "missing":
        store._objects.put(found, spoiled[how])
    return found


@pytest.mark.parametrize("which", ["run1$", "run1/checkpoint-30", "run1/checkpoint-10", "run1/checkpoint-30/."])
def test_a_store_that_cannot_be_listed_is_not_taken_for_empty(tmp_path, monkeypatch, which):
    """fsspec's own find leaves out what it cannot list, without a word."""
    with opened(f"unlisted://{tmp_path}/far/run1") as store:
        for step in (10, 20, 30):
            publish(store, tmp_path, SaveId(1, step))
        monkeypatch.setattr(Unlisted, "trouble", re.compile(which))
        with pytest.raises(PersistError, match="Input/output error"):
            store.scan()
        monkeypatch.undo()
        assert ids(store) == [(1, 30), (1, 20), (1, 10)]


@pytest.mark.parametrize("how", ["short", "empty", "missing"])
@pytest.mark.parametrize("name", ["model.pt", "rank_0.pt", "manifest.json"])
def test_a_damaged_checkpoint_in_a_store_does_not_count(near, tmp_path, name, how):
    publish(near, tmp_path, SaveId(0, 10))
    publish(near, tmp_path, SaveId(0, 20))
    spoiled = spoil(near, 20, name, how)
    with opened(near.path) as fresh:
        assert ids(fresh) == [(0, 10)]
        damaged = fresh.scan().damaged
    if (name, how) != ("manifest.json", "missing"):
        assert [where for where, _ in damaged] == [near._objects.url(spoiled.rpartition("/")[0])]
        assert name in damaged[0][1]


@pytest.mark.parametrize("name", ["model.pt", "rank_0.pt"])
def test_a_flipped_byte_in_a_store_is_found_on_download(near, tmp_path, name):
    publish(near, tmp_path, SaveId(0, 10))
    spoil(near, 10, name, "flipped")
    stored = near.checkpoints()[0]
    with pytest.raises(BadCheckpoint, match=f"{name} is damaged: its xxh3-128 is"):
        near.verify(stored)
    with pytest.raises(BadCheckpoint, match=f"{name} is damaged"):
        near.fetch(stored, [name], tmp_path / "into")
    assert list((tmp_path / "into").iterdir()) == []
    near.verify(stored, ["empty"])


def test_an_empty_file_on_s3_is_uploaded_and_fetched(on_s3, tmp_path):
    """No range of no bytes can be asked for."""
    publish(on_s3, tmp_path, SaveId(0, 10))
    publish(on_s3, tmp_path, SaveId(0, 20))
    spoil(on_s3, 20, "manifest.json", "empty")
    with opened(on_s3.path) as fresh:
        assert ids(fresh) == [(0, 10)]
        assert "is no JSON" in fresh.scan().damaged[0][1]


def test_a_flipped_byte_in_a_manifest_in_a_store_is_found(near, tmp_path):
    publish(near, tmp_path, SaveId(0, 10))
    spoil(near, 10, "manifest.json", "flipped")
    with opened(near.path) as fresh:
        assert fresh.checkpoints() == []
        assert len(fresh.scan().damaged) == 1


def test_a_manifest_in_another_place_does_not_count(near, tmp_path):
    publish(near, tmp_path, SaveId(0, 10))
    folder, sizes = objects_of(near, 10)
    for inner in sizes:
        near._objects.copy(f"{folder}/{inner}", f"checkpoint-11/{inner}")
    assert ids(near) == [(0, 10)]
    assert "belongs elsewhere" in near.scan().damaged[0][1]


def test_other_objects_in_a_store_are_left_alone(near, tmp_path):
    publish(near, tmp_path, SaveId(0, 10))
    others = ["notes.txt", "checkpoint-10/README", "checkpoint-7/model.pt", "checkpoint-x/0-00000000-000000000000/a"]
    for name in others:
        near._objects.put(name, b"mine")
    publish(near, tmp_path, SaveId(1, 10))
    assert near.sweep() == []
    assert assert_sound(near, tmp_path) == [(1, 10)]
    assert set(others) <= set(near._objects.sizes(""))


def test_a_quarantined_checkpoint_in_a_store_is_never_deleted(store, tmp_path):
    for step in (10, 20):
        publish(store, tmp_path, SaveId(0, step))
    where = store.quarantine(store.checkpoints()[0], "a byte\nflipped")
    assert ids(store) == [(0, 10)]
    assert store.scan().quarantined == [(where, "a byte flipped")]
    publish(store, tmp_path, SaveId(1, 20))
    store.delete(SaveId(0, 20))
    assert store.sweep() == []
    assert store.scan().quarantined == [(where, "a byte flipped")]
    assert f"{where}/model.pt".removeprefix(store.path + "/") in store._objects.sizes("")
    spoil(store, 10, "model.pt", "short")
    damaged, why = store.scan().damaged[0]
    store.quarantine(damaged, why)
    assert [url for url, _ in store.scan().quarantined] == [damaged, where]
    with pytest.raises(PersistError, match="not there any more"):
        store.quarantine(damaged + "0", why)


# --- writers that die


def die_at(monkeypatch: pytest.MonkeyPatch, store: RemoteStore, method: str, call: int) -> None:
    """From that call on nothing of the store's writer happens: neither what was to come, nor any cleaning up."""
    calls = [0]
    places = {"put": store._objects, "upload_file": upload, "remove": store._objects, "copy": store._objects}
    for name, place in places.items():
        real = getattr(place, name)

        def dying(*arguments: Any, name: str = name, real: Any = real) -> Any:
            calls[0] += (name == method) or calls[0] >= call
            if calls[0] >= call:
                raise ConnectionError("the process is dead")
            return real(*arguments)

        monkeypatch.setattr(place, name, dying)


@pytest.mark.parametrize(
    ("method", "call"), [("upload_file", 1), ("upload_file", 3), ("copy", 1), ("put", 4), ("put", 5)]
)
def test_a_killed_upload_leaves_the_old_or_the_new_checkpoint(near, tmp_path, monkeypatch, method, call):
    publish(near, tmp_path, SaveId(1, 10))
    writer = RemoteStore(near.path)
    die_at(monkeypatch, writer, method, call)
    try:
        publish(writer, tmp_path, SaveId(2, 10), target="copy.pt")
        committed = True
    except PersistError as error:
        committed = False
        assert "the process is dead" in str(error)
    assert committed == ((method, call) == ("put", 5)), "three images, the manifest, the tracker"
    assert assert_sound(near, tmp_path) == ([(2, 10), (1, 10)] if committed else [(1, 10)])
    near.sweep()
    assert assert_sound(near, tmp_path) == ([(2, 10), (1, 10)] if committed else [(1, 10)])
    assert len({name.split("/")[1] for name in objects_of(near, 10)[1] for name in [f"x/{name}"]}) == 1 + committed
    writer.close()


def test_leftovers_of_a_killed_upload_are_swept(on_s3, s3, large, tmp_path):  # noqa: F811
    """SIGKILL in the middle of an upload, with parts on their way and a small file there."""
    publish(on_s3, tmp_path, SaveId(0, 1))
    before = s3.objects()
    stalled = s3.inject(Fault("stall", "PUT", "partNumber=[234]", times=100))
    program = f"""
import pathlib
from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.remote import objects
from fastckpt._core.storage.remote.remote_store import RemoteStore
objects.PART = 5 * 2**20
folder = pathlib.Path({str(large["model.pt"].parent)!r})
RemoteStore("s3://bucket/run1").publish(PublishRequest(SaveId(1, 1), {{path.name: path for path in folder.iterdir()}}))
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        end = time.monotonic() + 60
        while not (stalled.injected and len(s3.objects()) > len(before)):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert assert_sound(on_s3, tmp_path) == [(0, 1)]
    assert len(s3.uploads()) == 1
    assert len(on_s3.sweep()) == 2, "the upload, and the place with the small file"
    assert (s3.objects(), s3.uploads()) == (before, [])


def test_a_sweep_keeps_uploads_of_other_hosts_that_may_be_in_progress(on_s3, s3, monkeypatch):  # noqa: F811
    theirs = "checkpoint-5/0-ffffffff-000000000000"
    on_s3._objects.put(f"{theirs}/model.pt", b"theirs")
    assert on_s3.sweep() == []
    monkeypatch.setattr("fastckpt._core.storage.remote.remote_store.ABANDONED", -60.0)
    assert on_s3.sweep() == [f"s3://bucket/run1/{theirs}"]
    assert s3.objects() == {}


def test_a_sweep_aborts_only_uploads_of_checkpoints(on_s3, s3):  # noqa: F811
    """The server says of every upload that it began in 2010."""
    for key in ("checkpoint-6/0-ffffffff-000000000000/model.pt", "checkpoint-6/mine", "mine"):
        s3.fs.call_s3("create_multipart_upload", Bucket="bucket", Key=f"run1/{key}")
    assert on_s3.sweep() == ["s3://bucket/run1/checkpoint-6/0-ffffffff-000000000000/model.pt"]
    assert sorted(s3.uploads()) == ["run1/checkpoint-6/mine", "run1/mine"]


def test_a_checkpoint_whose_deletion_was_cut_off_does_not_count_and_is_swept(store, tmp_path, monkeypatch):
    for step in (10, 20):
        publish(store, tmp_path, SaveId(0, step))
    deleter = RemoteStore(store.path)
    die_at(monkeypatch, deleter, "remove", 2)
    with pytest.raises(PersistError, match="the process is dead"):
        deleter.delete(SaveId(0, 10))
    assert assert_sound(store, tmp_path) == [(0, 20)]
    assert objects_of(store, 10)[1] != {}
    assert len(store.sweep()) == 1
    assert objects_of(store, 10)[1] == {}
    deleter.close()


# --- S3 with a bad network


REQUESTS = {
    "begin": ("POST", r"model.pt\?uploads"),
    "part": ("PUT", "partNumber=2"),
    "complete": ("POST", "uploadId"),
    "small": ("PUT", "rank_0.pt"),
    "list": ("GET", "prefix="),
    "manifest": ("PUT", "manifest.json"),
}


@pytest.mark.parametrize("how", ["drop", "lose", 500, 503, "stall"])
def test_transient_errors_during_a_publication_are_retried(on_s3, s3, large, tmp_path, how):  # noqa: F811
    """Each kind of request of a publication meets it once."""
    faults = [Fault(how, *request) for request in REQUESTS.values()]
    s3.inject(*faults)
    on_s3.publish(PublishRequest(SaveId(0, 1), large))
    assert [fault.injected for fault in faults] == [1] * len(REQUESTS)
    assert assert_sound(on_s3, tmp_path) == [(0, 1)]
    assert (tmp_path / "fetched-0-1/model.pt").read_bytes() == large["model.pt"].read_bytes()
    assert len(s3.uploads()) == (how == "lose"), "a lost answer to the first request leaves one that nobody knows of"
    assert len(on_s3.sweep()) == (how == "lose")
    assert s3.uploads() == []


def test_transient_errors_while_reading_are_retried(on_s3, s3, large, tmp_path):  # noqa: F811
    on_s3.publish(PublishRequest(SaveId(0, 1), large))
    for how in ("drop", 500, 503, "cut", "flip"):
        fault = s3.inject(Fault(how, "GET", "model.pt", after=1))
        on_s3.fetch(on_s3.checkpoints()[0], ["model.pt"], tmp_path / "into")
        assert fault.injected == 1
    assert (tmp_path / "into/model.pt").read_bytes() == large["model.pt"].read_bytes()


def test_permanent_errors_fail_a_publication_and_leave_nothing(on_s3, s3, large, tmp_path):  # noqa: F811
    publish(on_s3, tmp_path, SaveId(0, 1))
    before = s3.objects()
    for verb, path in REQUESTS.values():
        if path != "prefix=":  # without lists nothing can be cleaned up
            fault = s3.inject(Fault(403, verb, path, times=1000))
            with pytest.raises(PersistError, match=r"cannot persist step 1 of history 1 in s3://bucket/run1.*credent"):
                on_s3.publish(PublishRequest(SaveId(1, 1), large))
            assert fault.injected
            cleaned(on_s3)
            s3.proxy.faults.clear()
            assert s3.objects() == before
            assert s3.uploads() == []
    assert assert_sound(on_s3, tmp_path) == [(0, 1)]
    on_s3.publish(PublishRequest(SaveId(1, 1), large))
    assert ids(on_s3) == [(1, 1)]


def test_a_store_that_stays_unreachable_is_an_error(on_s3, s3, tmp_path, monkeypatch):  # noqa: F811
    publish(on_s3, tmp_path, SaveId(0, 1))
    monkeypatch.setattr(client_module, "REQUEST_DEADLINE", 1.0)
    s3.inject(Fault("drop", times=10**6))
    for deed in (lambda: publish(on_s3, tmp_path, SaveId(0, 2)), on_s3.scan, lambda: on_s3.delete(SaveId(0, 0))):
        with pytest.raises(PersistError, match="See whether the store can be reached"):
            deed()
    s3.proxy.faults.clear()
    assert len(on_s3.sweep()) <= 1
    assert assert_sound(on_s3, tmp_path) == [(0, 1)]


def test_a_lost_answer_to_the_manifest_upload_leaves_a_complete_checkpoint_or_none(on_s3, s3, tmp_path):  # noqa: F811
    """The manifest arrives, but no answer does, nor any request after it."""
    s3.inject(Fault("lose", "PUT", "manifest.json"), Fault(403, "PUT|DELETE", "manifest", times=10**6))
    with pytest.raises(PersistError):
        publish(on_s3, tmp_path, SaveId(0, 1))
    cleaned(on_s3)
    s3.proxy.faults.clear()
    assert assert_sound(on_s3, tmp_path) == [(0, 1)]
    on_s3.sweep()
    assert assert_sound(on_s3, tmp_path) == [(0, 1)]


def test_readers_of_a_store_see_the_old_or_the_new_checkpoint_at_any_time(on_s3, tmp_path):
    reader, stop, seen, wrong = RemoteStore(on_s3.path), threading.Event(), [], []

    def read() -> None:
        while not stop.is_set():
            scan = reader.scan()
            seen.append(scan.whole[0].id)
            wrong.extend(scan.damaged)

    publish(on_s3, tmp_path, SaveId(0, 10))
    thread = threading.Thread(target=read)
    thread.start()
    for history in range(1, 8):
        publish(on_s3, tmp_path, SaveId(history, 10))
    stop.set()
    thread.join()
    reader.close()
    assert seen == sorted(seen)
    assert len(seen) > 7
    assert wrong == []


def test_an_upload_holds_few_parts_in_memory(on_s3, s3, tmp_path):  # noqa: F811
    """A file of 256 MB; the whole process may take 200 MB more."""
    big = tmp_path / "big"
    big.mkdir()
    (big / "model.pt").touch()
    os.truncate(big / "model.pt", 256 * 10**6)
    program = f"""
import resource, pathlib
from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.remote.remote_store import RemoteStore
store = RemoteStore("s3://bucket/big")
store.checkpoints()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store.publish(PublishRequest(SaveId(0, 1), {{"model.pt": pathlib.Path({str(big / "model.pt")!r})}}))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
store.close()
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200_000, f"{int(done.stdout) / 1000:.0f} MB more"


# --- locations


@pytest.mark.parametrize(
    ("location", "is_what"),
    [
        ("s3://Bucket/a//b/", "s3://Bucket/a/b"),
        ("S3://bucket", "s3://bucket"),
        ("hdfs:///data/run", "hdfs:///data/run"),
        ("memory://x", "memory://x"),
        ("file:///tmp/x", "/tmp/x"),
        ("local:///tmp//x/", "/tmp/x"),
    ],
)
def test_each_location_has_one_normalized_form(location, is_what):
    assert normalised(location) == is_what


@pytest.mark.parametrize("location", ["s3://", "s3:///", "s3://bucket/../x", "simplecache::s3://bucket/x"])
def test_invalid_locations_are_refused(location):
    with pytest.raises(ConfigError):
        normalised(location)


@pytest.mark.parametrize(
    ("location", "path", "target"),
    [
        ("s3://bucket/run", "best.pt", "s3://bucket/run/best.pt"),
        ("s3://bucket/run", "S3://other/best.pt", "s3://other/best.pt"),
        ("s3://bucket/run", "", ""),
        ("/data/run", "/data/run/best.pt", "/data/run/best.pt"),
    ],
)
def test_paths_of_the_user_resolve_to_targets_in_the_store(location, path, target):
    assert target_in(location, path, SaveId(0, 6)) == target


@pytest.mark.parametrize(
    ("location", "path"),
    [("s3://bucket/run", "/tmp/x.pt"), ("s3://bucket/run", "gs://bucket/x.pt"), ("/data/run", "s3://bucket/x.pt")],
)
def test_targets_outside_the_store_are_refused(location, path):
    with pytest.raises(ConfigError, match="cannot save to"):
        target_in(location, path, SaveId(0, 6))


def test_unknown_protocols_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match="Install the fsspec implementation"):
        open_store("nosuch://bucket/x")


def test_a_bucket_that_is_missing_is_no_fresh_start(s3):  # noqa: F811
    with opened("s3://no-such-bucket/run") as store:
        for deed in (store.scan, lambda: store.mark("1" * 32), store.sweep):
            with pytest.raises(PersistError, match="Make the bucket"):
                deed()


def test_without_a_url_no_storage_client_is_imported():
    program = "import sys, fastckpt.ddp, fastckpt._core.saver.server; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", "import json; " + program], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert not {"fsspec", "s3fs", "aiobotocore", "boto3"} & set(found)
