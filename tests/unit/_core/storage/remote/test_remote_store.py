"""A store at a URL: which checkpoints count, and that none is lost or mixed, whatever request fails."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.remote import filesystem as client_module
from fastckpt._core.storage.remote import objects as objects_module
from fastckpt._core.storage.remote import upload
from fastckpt._core.storage.remote.remote_store import RemoteStore
from fastckpt._core.storage.store import normalised, open_store, target_in
from fastckpt.errors import BadCheckpoint, ConfigError, PersistError
from tests.support.tables import for_each
from tests.unit._core.storage.checkpoints import ids, images
from tests.unit._core.storage.conftest import Plain
from tests.unit._core.storage.s3 import S3, Fault

MIB = 2**20
TRACKER = "latest_checkpointed_iteration.txt"
THEIRS = "checkpoint-5/0-ffffffff-000000000000"


class Unlisted(Plain):
    """One that cannot list some directories."""

    protocol = "unlisted"
    trouble = re.compile("nothing")

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        if self.trouble.search(path):
            raise OSError(5, "Input/output error", path)
        return super().ls(path, detail, **kwargs)


fsspec.register_implementation("unlisted", Unlisted, clobber=True)


@contextmanager
def opened(url: str) -> Iterator[RemoteStore]:
    store = RemoteStore(url)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture(params=["s3", "memory", "plain"])
def store(request: pytest.FixtureRequest, tmp_path: Path, s3_server: str) -> Iterator[RemoteStore]:
    """The same store over different protocols."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    place = {"s3": "bucket", "memory": tmp_path.name, "plain": f"{tmp_path}/plain"}[request.param]
    with opened(f"{request.param}://{place}/run1") as made:
        yield made


@pytest.fixture
def near(tmp_path: Path) -> Iterator[RemoteStore]:
    """A store that answers at once, for what is decided by names and sizes alone."""
    with opened(f"memory://{tmp_path.name}/run1") as made:
        yield made


@pytest.fixture
def on_s3(s3: S3) -> Iterator[RemoteStore]:
    with opened("s3://bucket/run1") as made:
        yield made


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A checkpoint whose model travels in two parts and a rest."""
    monkeypatch.setattr(objects_module, "PART", MIB)
    source = tmp_path / "large"
    source.mkdir()
    (source / "model.pt").write_bytes(os.urandom(2 * MIB + 12345))
    (source / "rank_0.pt").write_bytes(b"own")
    return {name: source / name for name in ("model.pt", "rank_0.pt")}


def publish(store: RemoteStore, folder: Path, id: SaveId, **options: Any) -> None:
    store.publish(PublishRequest(id, images(folder / f"image-{id.history}-{id.step}", id), **options))


def cleaned(store: RemoteStore) -> None:
    """What a failed publication left is cleaned up in the background."""
    store._objects._cleaner.submit(int).result(60)


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


def test_a_store_publishes_lists_fetches_and_deletes(store, tmp_path):
    assert store.checkpoints() == store.sweep() == []
    publish(store, tmp_path, SaveId(1, 10), parent=SaveId(0, 7), details={"threads": 3}, target="best.pt")
    elsewhere = f"{store.path.rpartition('/')[0]}/elsewhere.pt"  # a manifest may name any object of the bucket
    for step, target in ((15, "named/15.pt"), (16, elsewhere), (20, "best.pt")):
        publish(store, tmp_path, SaveId(1, step), target=target)
    assert assert_sound(store, tmp_path) == [(1, 20), (1, 16), (1, 15), (1, 10)]
    with opened(store.path) as another:
        newest, *_, oldest = another.checkpoints()
    assert (oldest.manifest.parent, oldest.manifest.details, oldest.manifest.world_size) == ((0, 7), {"threads": 3}, 1)
    assert newest.path == oldest.path == store.path + "/best.pt"
    assert [store._objects.read(name, 10) for name in (TRACKER, "best.pt")] == [b"20", b"1.20 model"]
    for id in (SaveId(0, 17), SaveId(1, 15), SaveId(1, 16), SaveId(1, 10)):
        store.delete(id)
    assert assert_sound(store, tmp_path) == [(1, 20)]
    assert [name for name in store._objects.sizes("") if name.startswith(("checkpoint-1", "named"))] == []
    assert store._objects.read("best.pt", 10) == b"1.20 model", "it is the newer one's"
    assert store._objects.read(store._objects.name(elsewhere), 10) == b"1.16 model", "it is its user's"
    with pytest.raises(ConfigError, match="newest of 1 whole"):
        store.delete(SaveId(1, 20))
    assert "best.pt" in store._objects.sizes("")
    publish(store, tmp_path, SaveId(2, 20))
    assert ids(store) == [(2, 20)]
    assert re.fullmatch(
        re.escape(store.path) + "/checkpoint-20/2-[0-9a-f]{8}-[0-9a-f]{12}", store.checkpoints()[0].path
    )
    publish(store, tmp_path, SaveId(1, 20))  # one that comes late takes nothing's place
    assert assert_sound(store, tmp_path) == [(2, 20), (1, 20)]


def test_a_step_saved_to_two_paths_is_at_both_and_at_none_that_would_tear_something(near, tmp_path):
    for path in ("checkpoint-1/0-00000000-000000000000/model.pt", ".fastckpt/x", "a/../../x", TRACKER):
        with pytest.raises((ConfigError, BadCheckpoint)):
            publish(near, tmp_path, SaveId(0, 1), target=path)
    assert near.checkpoints() == []
    for path in ("a.pt", "b.pt", "b.pt"):
        publish(near, tmp_path, SaveId(0, 10), target=path)
    assert sorted(stored.path for stored in near.scan().places) == [f"{near.path}/a.pt", f"{near.path}/b.pt"]
    assert len(near.checkpoints()) == 1


def test_the_identity_of_a_store_lasts_as_long_as_its_location(near):
    first, second = "1" * 32, "2" * 32
    assert near.identity() == ("", 0), "who only looks marks nothing"
    assert near.mark(first) == first
    with opened(near.path) as another:
        assert another.mark(second) == first and another.identity() == (first, 0)
    for torn in (b"", b"123"):
        near._objects.put(".fastckpt/identity", torn)
        assert near.identity() == ("", 0)
        assert near.mark(second) == second == near.identity().mark
    near._objects.remove_all(".fastckpt")
    assert near.identity() == ("", 0)
    assert near.mark(second) == second


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


def test_a_store_that_cannot_be_listed_is_not_taken_for_empty(tmp_path, monkeypatch):
    """fsspec's own find leaves out what it cannot list, without a word."""
    with opened(f"unlisted://{tmp_path}/far/run1") as store:
        for step in (10, 20, 30):
            publish(store, tmp_path, SaveId(1, step))
        for which in ("run1$", "run1/checkpoint-10", "run1/checkpoint-30/."):
            with monkeypatch.context() as patch, pytest.raises(PersistError, match="Input/output error"):
                patch.setattr(Unlisted, "trouble", re.compile(which))
                store.scan()
        assert ids(store) == [(1, 30), (1, 20), (1, 10)]


@pytest.mark.parametrize(
    ("name", "how"),
    [("model.pt", "short"), ("rank_0.pt", "missing"), ("model.pt", "flipped"), ("rank_0.pt", "empty")]
    + [("manifest.json", how) for how in ("short", "missing", "flipped")],
)
def test_a_damaged_checkpoint_in_a_store_does_not_count(near, tmp_path, name, how):
    publish(near, tmp_path, SaveId(0, 10))
    publish(near, tmp_path, SaveId(0, 20))
    spoiled = spoil(near, 20, name, how)
    if how == "flipped" and name != "manifest.json":  # a scan looks at sizes only
        stored = near.checkpoints()[0]
        with pytest.raises(BadCheckpoint, match=f"{name} is damaged: its xxh3-128 is"):
            near.verify(stored)
        with pytest.raises(BadCheckpoint, match=f"{name} is damaged"):
            near.fetch(stored, [name], tmp_path / "into")
        assert list((tmp_path / "into").iterdir()) == []
        near.verify(stored, ["empty"])
        return
    with opened(near.path) as fresh:
        assert ids(fresh) == [(0, 10)]
        damaged = fresh.scan().damaged
    if (name, how) != ("manifest.json", "missing"):
        assert [where for where, _ in damaged] == [near._objects.url(spoiled.rpartition("/")[0])]
        assert name in damaged[0][1]


def test_other_objects_and_manifests_in_other_places_do_not_count_and_are_left_alone(near, tmp_path):
    publish(near, tmp_path, SaveId(0, 10))
    others = ["notes.txt", "checkpoint-10/README", "checkpoint-7/model.pt", "checkpoint-x/0-00000000-000000000000/a"]
    for name in others:
        near._objects.put(name, b"mine")
    publish(near, tmp_path, SaveId(1, 10))
    assert near.sweep() == []
    assert assert_sound(near, tmp_path) == [(1, 10)]
    assert set(others) <= set(near._objects.sizes(""))
    folder, sizes = objects_of(near, 10)
    for inner in sizes:
        near._objects.copy(f"{folder}/{inner}", f"checkpoint-11/{inner}")
    assert ids(near) == [(1, 10)]
    assert "belongs elsewhere" in near.scan().damaged[0][1]


def test_a_quarantined_checkpoint_in_a_store_is_never_deleted(near, tmp_path):
    for step in (10, 20):
        publish(near, tmp_path, SaveId(0, step))
    where = near.quarantine(near.checkpoints()[0], "a byte\nflipped")
    assert ids(near) == [(0, 10)]
    assert near.scan().quarantined == [(where, "a byte flipped")]
    publish(near, tmp_path, SaveId(1, 20))
    near.delete(SaveId(0, 20))
    assert near.sweep() == []
    assert near.scan().quarantined == [(where, "a byte flipped")]
    assert f"{where}/model.pt".removeprefix(near.path + "/") in near._objects.sizes("")
    spoil(near, 10, "model.pt", "short")
    damaged, why = near.scan().damaged[0]
    near.quarantine(damaged, why)
    assert [url for url, _ in near.scan().quarantined] == [damaged, where]
    with pytest.raises(PersistError, match="not there any more"):
        near.quarantine(damaged + "0", why)


def test_checkpoints_deleted_by_others_are_not_relied_upon(near, tmp_path):
    """By hand, say: the newest of what is left is never deleted."""
    for step in (1, 2, 3, 4):
        publish(near, tmp_path, SaveId(1, step))
    assert len(near.checkpoints()) == 4
    for step in (3, 4):
        near._objects.remove_all(f"checkpoint-{step}")
    with pytest.raises(ConfigError, match="is the newest of"):
        near.delete(SaveId(1, 2))
    near.delete(SaveId(1, 1))
    assert ids(near) == [stored.id for stored in near.known()] == [SaveId(1, 2)]


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
    committed = (method, call) == ("put", 5)  # three images, the manifest, the tracker
    with opened(near.path) as writer:
        die_at(monkeypatch, writer, method, call)
        try:
            publish(writer, tmp_path, SaveId(2, 10), target="copy.pt")
            assert committed
        except PersistError as error:
            assert not committed and "the process is dead" in str(error)
    found = [(2, 10), (1, 10)] if committed else [(1, 10)]
    assert assert_sound(near, tmp_path) == found
    near.sweep()
    assert assert_sound(near, tmp_path) == found
    assert len({name.split("/")[0] for name in objects_of(near, 10)[1]}) == 1 + committed


def test_a_checkpoint_whose_deletion_was_cut_off_does_not_count_and_is_swept(near, tmp_path, monkeypatch):
    for step in (10, 20):
        publish(near, tmp_path, SaveId(0, step))
    with opened(near.path) as deleter:
        die_at(monkeypatch, deleter, "remove", 2)
        with pytest.raises(PersistError, match="the process is dead"):
            deleter.delete(SaveId(0, 10))
    assert assert_sound(near, tmp_path) == [(0, 20)]
    assert objects_of(near, 10)[1] != {}
    assert len(near.sweep()) == 1
    assert objects_of(near, 10)[1] == {}


UPLOAD = """
import pathlib, resource, sys
from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.remote import objects
from fastckpt._core.storage.remote.remote_store import RemoteStore
objects.PART = 5 * 2**20
store = RemoteStore("s3://bucket/run1")
store.checkpoints()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store.publish(PublishRequest(SaveId(1, 1), {path.name: path for path in pathlib.Path(sys.argv[1]).iterdir()}))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
store.close()
"""


def test_an_upload_holds_few_parts_in_memory(s3, tmp_path):
    """A file of 16 parts of 5 MiB; the whole process may take 60 MB more."""
    (tmp_path / "big").mkdir()
    with (tmp_path / "big/model.pt").open("wb") as file:
        file.truncate(16 * 5 * MIB)
    command = [sys.executable, "-c", UPLOAD, tmp_path / "big"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 60_000, f"{int(done.stdout) / 1000:.0f} MB more"


def test_a_sweep_aborts_only_uploads_of_checkpoints_that_may_not_be_in_progress(on_s3, s3, monkeypatch):
    """The server says of every upload that it began in 2010."""
    on_s3._objects.put(f"{THEIRS}/model.pt", b"theirs")
    assert on_s3.sweep() == []
    for key in (f"{THEIRS}/rank_0.pt", "checkpoint-6/mine", "mine"):
        s3.fs.call_s3("create_multipart_upload", Bucket="bucket", Key=f"run1/{key}")
    assert on_s3.sweep() == [f"s3://bucket/run1/{THEIRS}/rank_0.pt"]
    assert sorted(s3.uploads()) == ["run1/checkpoint-6/mine", "run1/mine"]
    monkeypatch.setattr("fastckpt._core.storage.remote.remote_store.ABANDONED", -60.0)
    assert on_s3.sweep() == [f"s3://bucket/run1/{THEIRS}"]
    assert s3.objects() == {}


# --- S3 with a bad network


REQUESTS = {
    "begin": ("POST", r"model.pt\?uploads"),
    "part": ("PUT", "partNumber=2"),
    "complete": ("POST", "uploadId"),
    "small": ("PUT", "rank_0.pt"),
    "list": ("GET", "prefix="),
    "manifest": ("PUT", "manifest.json"),
}


def test_transient_errors_are_retried(on_s3, s3, large, tmp_path):
    """Each kind of request of a publication meets each once."""
    hows = ("drop", 500, "lose")
    faults = [Fault(how, *request) for request in REQUESTS.values() for how in hows]
    s3.inject(*faults)
    on_s3.publish(PublishRequest(SaveId(0, 1), large))
    assert [fault.injected for fault in faults] == [1] * len(faults)
    assert assert_sound(on_s3, tmp_path) == [(0, 1)]
    assert (tmp_path / "fetched-0-1/model.pt").read_bytes() == large["model.pt"].read_bytes()
    assert len(s3.uploads()) == len(on_s3.sweep()) == 1, "after a lost answer to the first nobody knows of one"
    assert s3.uploads() == []
    for how in (*hows, "cut", "flip"):
        fault = s3.inject(Fault(how, "GET", "model.pt", after=1))
        on_s3.fetch(on_s3.checkpoints()[0], ["model.pt"], tmp_path / "into")
        assert fault.injected == 1
    assert (tmp_path / "into/model.pt").read_bytes() == large["model.pt"].read_bytes()


def test_permanent_errors_fail_a_publication_and_leave_nothing(on_s3, s3, large, tmp_path):
    publish(on_s3, tmp_path, SaveId(0, 1))
    before = s3.objects()
    for verb, path in REQUESTS.values():
        if path != "prefix=":  # without lists nothing can be cleaned up
            fault = s3.inject(Fault(403, verb, path, times=1000))
            with pytest.raises(PersistError, match=r"cannot persist step 1 of history 1 in s3://bucket/run1.*credent"):
                on_s3.publish(PublishRequest(SaveId(1, 1), large))
            assert fault.injected
            cleaned(on_s3)
            s3.faults.clear()
            assert (s3.objects(), s3.uploads()) == (before, [])
    assert assert_sound(on_s3, tmp_path) == [(0, 1)]
    on_s3.publish(PublishRequest(SaveId(1, 1), large))
    assert ids(on_s3) == [(1, 1)]


def test_a_store_that_stays_unreachable_or_has_no_bucket_is_an_error_and_no_fresh_start(
    on_s3, s3, tmp_path, monkeypatch
):
    publish(on_s3, tmp_path, SaveId(0, 1))
    with opened("s3://no-such-bucket/run") as store:
        for deed in (store.scan, lambda: store.mark("1" * 32), store.sweep):
            with pytest.raises(PersistError, match="Make the bucket"):
                deed()
    monkeypatch.setattr(client_module, "REQUEST_DEADLINE", 0.3)
    s3.inject(Fault("drop", times=10**6))
    for deed in (lambda: publish(on_s3, tmp_path, SaveId(0, 2)), on_s3.scan, lambda: on_s3.delete(SaveId(0, 0))):
        with pytest.raises(PersistError, match="See whether the store can be reached"):
            deed()
    s3.faults.clear()
    monkeypatch.undo()
    assert len(on_s3.sweep()) <= 1
    assert assert_sound(on_s3, tmp_path) == [(0, 1)]


def test_a_lost_answer_to_the_manifest_upload_leaves_a_complete_checkpoint_or_none(on_s3, s3, tmp_path):
    """The manifest arrives, but no answer does, nor any request after it."""
    s3.inject(Fault("lose", "PUT", "manifest.json"), Fault(403, "PUT|DELETE", "manifest", times=10**6))
    with pytest.raises(PersistError):
        publish(on_s3, tmp_path, SaveId(0, 1))
    cleaned(on_s3)
    s3.faults.clear()
    assert assert_sound(on_s3, tmp_path) == [(0, 1)]
    on_s3.sweep()
    assert assert_sound(on_s3, tmp_path) == [(0, 1)]


# --- locations


NORMAL = {
    "s3://Bucket/a//b/": "s3://Bucket/a/b",
    "S3://bucket": "s3://bucket",
    "hdfs:///data/run": "hdfs:///data/run",
    "memory://x": "memory://x",
    "file:///tmp/x": "/tmp/x",
    "local:///tmp//x/": "/tmp/x",
}


def test_each_location_has_one_normalized_form_or_is_refused():
    assert {location: normalised(location) for location in NORMAL} == NORMAL
    for location in ("s3://", "s3:///", "s3://bucket/../x", "simplecache::s3://bucket/x"):
        with pytest.raises(ConfigError):
            normalised(location)
    with pytest.raises(ConfigError, match="Install the fsspec implementation"):
        open_store("nosuch://bucket/x")


@for_each(
    ("s3://bucket/run", "best.pt", "s3://bucket/run/best.pt"),
    ("s3://bucket/run", "S3://other/best.pt", "s3://other/best.pt"),
    ("s3://bucket/run", "", ""),
    ("/data/run", "/data/run/best.pt", "/data/run/best.pt"),
)
def test_paths_of_the_user_resolve_to_targets_in_the_store(location, path, target):
    assert target_in(location, path, SaveId(0, 6)) == target


@for_each(("s3://bucket/run", "/tmp/x.pt"), ("s3://bucket/run", "gs://bucket/x.pt"), ("/data/run", "s3://bucket/x.pt"))
def test_paths_of_the_user_in_another_place_are_refused(location, path):
    with pytest.raises(ConfigError, match="cannot save to"):
        target_in(location, path, SaveId(0, 6))
