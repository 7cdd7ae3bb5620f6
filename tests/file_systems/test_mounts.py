"""The library on file systems that are mounted for the test, and jobs on each and on a FUSE server that fails."""

import errno
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from fastckpt._core.config import RankInfo
from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.directory_root import DirectoryRoot
from fastckpt._core.io.file_system import FileSystem, file_system_of
from fastckpt._core.preflight import make_ready
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.local.layout import Layout
from fastckpt.errors import ConfigError, PersistError
from tests.faults.jobs import Job, assert_as_if_nothing_had_happened
from tests.file_systems import operations
from tests.file_systems.mounts import (
    FILE_SYSTEMS,
    Mount,
    Mounted,
    Unavailable,
    mounted,
    on_device,
    own_fuse,
    run,
    unmount,
    version_of,
)
from tests.file_systems.table import PAGE, record, results, table
from tests.support.live_folders import remove_live
from tests.support.tables import for_each
from tests.unit._core.storage.checkpoints import assert_clean, assert_sound, ids, images, publish
from tests.unit._core.storage.conftest import fast_path  # noqa: F401 (a fixture)
from tests.unit._core.storage.killed import Act, killed_at_each

PLACE = RankInfo()
SAVE, NEXT = SaveId(1, 1), SaveId(1, 2)


OLDER, OLD, NEW, LAST = SaveId(0, 6), SaveId(0, 7), SaveId(1, 7), SaveId(1, 8)


def prepare(directory: CheckpointDirectory) -> None:
    directory.path.mkdir(parents=True)
    publish(directory, OLDER)
    publish(directory, OLD)


def act(directory: CheckpointDirectory) -> None:
    """Publish over a checkpoint of the same step, and delete another."""
    publish(directory, NEW)
    directory.delete(OLDER)


def let_time_pass(directory: CheckpointDirectory) -> None:
    """Two hours since a writer was killed: without locks, a sweep believes no writer dead any sooner."""
    private = directory.path / ".fastckpt"
    for draft in (*private.glob("tmp-*"), *private.glob("dropped-*")):
        for path in (draft, *draft.rglob("*")):
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 7200))


def survive(folder: Path, stride: int, prepare: Act = prepare) -> int:
    """Kill before every so many of the operations; how often. What is there is always old or new, and whole."""
    kills = 0
    for directory, killed in killed_at_each(folder, prepare, act, stride):
        kills += killed
        found = assert_sound(CheckpointDirectory(directory.path))
        assert found[0] == NEW or (killed and found == [OLD, OLDER]), found
        let_time_pass(directory)
        directory.sweep()
        assert assert_sound(directory)[0] == found[0]
        publish(directory, LAST)
        assert assert_sound(directory)[0] == LAST
        directory.sweep()
        if Layout(directory.path).has_locks():
            assert_clean(directory)
        else:  # what made way counts still, and is deleted in its turn
            kinds = {path.name.partition("-")[0] for path in (directory.path / ".fastckpt").iterdir()}
            assert not kinds & {"tmp", "dropped", "parts"}, kinds
    return kills


@pytest.fixture
def fuse(mounting: ExitStack, tmp_path: Path) -> Mounted:
    return mounted(mounting, tmp_path, own_fuse)


def test_without_locks_a_publication_killed_anywhere_leaves_the_old_or_the_new(
    mounting: ExitStack, tmp_path: Path
) -> None:
    """On the others the campaign of jobs does the same."""
    path = mounted(mounting, tmp_path, FILE_SYSTEMS["FUSE without flock"]).path
    assert file_system_of(path / "not/there").mount_point == str(path)
    found = operations.all_on(path / "operations")
    assert found["fsync"] == "yes" and found["O_DIRECT"] in ("yes", "at open only", "refused"), found
    assert found["flock"] == "ENOSYS"
    make_ready(str(path / "checkpoints"), PLACE)
    assert os.listdir(path / "checkpoints") == []
    assert survive(path / "killed", stride=25) >= 2


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.campaign)])
def test_over_what_came_with_an_image_a_publication_killed_anywhere_leaves_the_old_or_the_new(
    fast_path: Path,  # noqa: F811
    mounting: ExitStack,
    stride: int,
) -> None:
    """On an overlay at the path of the image's files, as in a container."""

    def as_image(directory: CheckpointDirectory) -> None:
        prepare(directory)
        lower, *layers = (directory.path.parent.with_name(name) for name in ("root", "upper", "work"))
        for layer in layers:
            layer.mkdir()
        options = "lowerdir={},upperdir={},workdir={}".format(lower, *layers)
        run("mount", "-t", "overlay", "overlay", "-o", options, lower)
        mounting.callback(unmount, lower)
        with pytest.raises(OSError) as refused:  # else redirect_dir is on
            (directory.path / "checkpoint-6").rename(directory.path / "checkpoint-70")
        assert refused.value.errno == errno.EXDEV

    try:
        assert survive(fast_path, stride, as_image) >= 2
    except Unavailable as missing:
        pytest.skip(f"no overlay can be mounted here: {missing}")


def test_a_file_system_that_tears_directories_is_refused_by_its_name(fuse: Mounted) -> None:
    fuse.order('{"rename_directory": "EXDEV"}')
    path = fuse.path / "checkpoints"
    with pytest.raises(ConfigError, match=rf"checkpoint_dir is {path}, on .*Give .* URL of (the|a) store"):
        make_ready(str(path), PLACE)
    assert os.listdir(path) == []


@for_each(
    *[("fuse.s3fs", "s3fs", True), ("fuse.gcsfuse", "bucket", True), ("fuse", "mountpoint-s3", True)],
    *[("fuse", "blobfuse2", True), ("fuse.rclone", "remote:", True), ("fuse.geesefs", "bucket:run", True)],
    *[("fuse.sshfs", "host:/home", False), ("fuse.juicefs", "JuiceFS:runs", False), ("nfs4", "s3fs:/runs", False)],
)
def test_a_mount_of_an_object_store_is_known_by_what_its_program_calls_itself(
    kind: str, source: str, is_refused: bool
) -> None:
    assert FileSystem(kind, source, (), "/mnt").is_of_a_store is is_refused


def test_the_mount_of_a_path_is_found_whatever_its_name_and_what_it_hides(mounting: ExitStack, tmp_path: Path) -> None:
    outer = mounted(mounting, tmp_path / "a b\\c\n d", FILE_SYSTEMS["tmpfs"])
    assert file_system_of(outer.path / "not/yet").mount_point == str(outer.path)
    inner = mounted(mounting, outer.path, FILE_SYSTEMS["tmpfs"])
    assert file_system_of(inner.path).mount_point == str(inner.path)
    (tmp_path / "link").symlink_to(inner.path)
    assert file_system_of(tmp_path / "link/x").mount_point == str(inner.path)
    run("mount", "-t", "ramfs", "ramfs", inner.path)  # over the other
    assert file_system_of(inner.path).kind == "ramfs"
    run("umount", inner.path)


def test_a_rename_that_dies_midway_is_seen_by_the_probe_and_tears_nothing_that_counts(fuse: Mounted) -> None:
    directory = CheckpointDirectory(fuse.path / "dir")
    publish(directory, SAVE)
    fuse.order('{"torn_rename": true}')
    with pytest.raises(PersistError):
        publish(directory, NEXT)
    assert fuse.server is not None and fuse.server.wait() == -signal.SIGKILL
    backing = CheckpointDirectory(fuse.path.parent / "backing/dir")
    assert [stored.id for stored in backing.scan().places] == [SAVE], "half of a checkpoint does not count"


def test_errors_of_each_request_fail_a_persist_and_leave_older_checkpoints_whole(fuse: Mounted, tmp_path: Path) -> None:
    """Late ones, too: of a flush at close, which is where NFS and FUSE report that there was no room."""
    directory = CheckpointDirectory(fuse.path / "dir")
    publish(directory, SAVE)
    new = PublishRequest(NEXT, images(tmp_path / "images", NEXT), details={"omp_num_threads": 1})
    for request, error in [
        ("FSYNC", "EDQUOT"), ("FLUSH", "ENOSPC"), ("WRITE", "ENOSPC"), ("CREATE", "EROFS"), ("MKDIR", "ESTALE"),
        ("RENAME2", "EIO"), ("FSYNCDIR", "EIO"), ("OPEN", "EIO"),
    ]:  # fmt: skip
        fuse.order(f'{{"fail": {{"{request}": "{error}", "{request.removesuffix("2")}": "{error}"}}}}')
        with pytest.raises(PersistError, match=os.strerror(getattr(errno, error))):
            directory.publish(new)
        fuse.order()
        assert assert_sound(directory) == [SAVE], request
        directory.sweep()
        assert_clean(directory)
    directory.publish(new)
    assert assert_sound(directory) == [NEXT, SAVE]
    # a record that no writer knows of would say that another job has the directory
    before = set(os.listdir(fuse.path))
    fuse.order('{"fail": {"FLUSH": "ENOSPC"}}')
    with pytest.raises(OSError, match="No space left"):
        DirectoryRoot(fuse.path).write_text(fuse.path / "text", "text")
    fuse.order()
    assert set(os.listdir(fuse.path)) == before


def test_a_server_that_is_away_damages_nothing(fuse: Mounted) -> None:
    """Its errors say nothing of the files: they are not quarantined, and no older checkpoint is chosen."""
    directory = CheckpointDirectory(fuse.path / "dir")
    publish(directory, SAVE)
    fuse.order('{"stale_reads": 1}')  # a file that is replaced on the server while it is read is read again
    [stored] = directory.checkpoints()
    errors = {"OPEN": "ENOTCONN", "GETATTR": "ETIMEDOUT", "LOOKUP": "EHOSTDOWN", "READ": "ENOTCONN"}
    for request, error in errors.items():
        fuse.order(f'{{"fail": {{"{request}": "{error}"}}}}')
        with pytest.raises(PersistError):
            directory.verify(stored)
        with pytest.raises(PersistError):
            CheckpointDirectory(fuse.path / "dir").scan()
        fuse.order()
        assert [found.id for found in directory.scan().whole] == [SAVE]
    assert directory.scan().damaged == directory.scan().quarantined == []
    fuse.server.kill()
    fuse.server.wait()
    for act in (directory.scan, lambda: directory.verify(stored), lambda: publish(directory, NEXT)):
        with pytest.raises((PersistError, OSError)):
            act()
    assert ids(CheckpointDirectory(fuse.path.parent / "backing/dir")) == [SAVE]


@pytest.mark.parametrize(
    ("mount", "text"),
    [
        (FILE_SYSTEMS["tmpfs"], "on tmpfs: it is memory"),
        (FILE_SYSTEMS["overlay, volatile"], "volatile, which syncs nothing"),
        (on_device("ext4", "mkfs.ext4", "-q", options="nobarrier"), "on ext4: it is mounted with nobarrier"),
    ],
    ids=["tmpfs", "volatile", "nobarrier"],
)
def test_a_file_system_that_forgets_is_warned_of_once_a_node(
    mount: Mount, text: str, mounting: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = mounted(mounting, tmp_path, mount).path / "checkpoints"
    make_ready(str(path), PLACE)
    assert [text in record.message for record in caplog.records] == [True]
    make_ready(str(path), RankInfo(rank=1, local_rank=1, world_size=2, local_world_size=2))
    assert len(caplog.records) == 1


def restarts(job: Job) -> int:
    return len(job.resumes(0))


@pytest.mark.campaign
def test_a_job_goes_on_while_its_file_system_fails_stops_and_dies(
    fuse: Mounted, mounting: ExitStack, tmp_path: Path, new_job, uninterrupted
) -> None:
    """No room at close; a server that answers nothing for a while, a rank that dies then; a server that is killed."""
    job = new_job(checkpoint_dir=fuse.path / "checkpoints")
    job.start("--wait-at", "10", "20", "30", "40", restarts=2)
    job.wait_for_all(10)
    job.until(lambda: job.persisted(10), "step 10 durable")

    fuse.order('{"fail": {"FLUSH": "ENOSPC"}}')
    job.go_on(10)
    job.wait_for_all(20)
    job.until(lambda: "could not be persisted" in job.text(), "a failure")
    assert "No space left on device" in job.text()
    fuse.order()
    job.until(lambda: job.persisted(20), "step 20 durable")

    os.kill(fuse.server.pid, signal.SIGSTOP)
    job.go_on(20)
    job.wait_for_all(30)
    before = job.pid(0)
    job.kill_processes(1)
    job.until(lambda: job.pid(0) != before, "restarted workers")
    os.kill(fuse.server.pid, signal.SIGCONT)
    job.until(lambda: job.persisted(30), "step 30 durable")
    job.until(lambda: restarts(job) == 2, "a resume")
    assert job.resumes(0)[1] == (30, "memory")

    fuse.server.kill()
    fuse.server.wait()
    job.go_on(30)
    job.wait_for_all(40)
    job.until(lambda: "not connected" in job.text(), "a failure")
    job.kill_processes("agent", 0, 1)
    job.wait()
    code = job.start().wait()
    assert code != 0 and restarts(job) == 2, "no fresh start on a mount that is dead"
    unmount(fuse.path)
    mounting.enter_context(own_fuse(tmp_path / "file-system"))
    job.run()
    assert job.resumes(0)[-1] == (40, "memory")
    assert [step for step in job.stored() if step % 10 == 0][-3:] == [30, 20, 10]
    assert_as_if_nothing_had_happened(job, uninterrupted())


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FILE_SYSTEMS)
def test_on_each_file_system_jobs_that_are_killed_resume_from_memory_and_from_storage(
    name: str, mounting: ExitStack, tmp_path: Path, new_job, uninterrupted
) -> None:
    """A rank, the agent, all with their memory; the results are recorded for docs/clusters/file_systems.md."""
    path = mounted(mounting, tmp_path, FILE_SYSTEMS[name]).path
    record(name, version=version_of(name), **operations.all_on(path / "operations"))
    kills = survive(path / "killed", int(os.environ.get("STRIDE", "1")))
    job = new_job(checkpoint_dir=path / "checkpoints")
    job.start("--wait-at", "16", "36", restarts=2)
    job.wait_for_all(16)
    job.kill_processes(1)
    job.until(lambda: restarts(job) == 2, "a resume")
    job.go_on(16)
    job.wait_for_all(36)
    job.until(lambda: job.persisted(30), "step 30 durable")
    job.kill_processes("agent", 0, 1)
    job.wait()
    job.start("--wait-at", "46", restarts=2)
    job.wait_for_all(46)
    job.until(lambda: job.persisted(40), "step 40 durable")
    job.kill_processes("agent", 0, 1)
    job.wait()
    remove_live(job.arena())
    job.run()
    resumes = job.resumes(0)[1:]
    assert [tier for _, tier in resumes] == ["memory", "memory", "storage"] and resumes[2][0] >= 40, resumes
    assert job.ends() == uninterrupted().ends()
    for rank in (0, 1):
        assert job.losses(rank) == uninterrupted().losses(rank)
    record(name, **{"kills in a publication": kills, "jobs killed": len(resumes)})


def test_the_table_of_the_page_is_what_was_recorded() -> None:
    assert {result["name"] for result in results()} == set(FILE_SYSTEMS)
    assert table() + "\n" in PAGE.read_text(), "python -m tests.file_systems.table"
