"""Storage that refuses while a job runs: full, read-only, failing; memory stays new, and storage catches up."""

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.jobs import Job, assert_as_if_nothing_had_happened
from tests.support.small_disks import leave, mounted, unmount

MIB = 1 << 20
EXT4_IOC_SHUTDOWN, WITHOUT_LOG = 0x8004587D, 2


@pytest.fixture
def disk(tmp_path, new_job) -> Iterator[Path]:
    """A file system of 24 MiB; jobs end before it is unmounted."""
    path = mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=24m", "tmpfs")
    yield path
    new_job.end()
    unmount(path)


class Device:
    """A file system on a device of its own."""

    def __init__(self, image: Path, path: Path) -> None:
        self.path = path
        self._image = image

    def pull_out(self) -> None:
        """From now on the kernel answers every call with EIO."""
        descriptor = os.open(self.path, os.O_RDONLY)
        fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", WITHOUT_LOG))
        os.close(descriptor)

    def put_back(self) -> None:
        """What had reached the device, mounted anew.

        From a copy: mounted twice, one image is one file system, so a mount namespace that another test made meanwhile
        would keep this one as it is.
        """
        unmount(self.path)
        copy = self._image.with_suffix(".copy")
        shutil.copyfile(self._image, copy)
        subprocess.run(["mount", "-o", "loop", copy, self.path], check=True)


def new_device(folder: Path) -> Device:
    """A file system of 64 MiB on a device of its own, mounted in a folder; skips the test where none can be made."""
    if subprocess.run(["which", "mkfs.ext4", "losetup"], capture_output=True, check=False).returncode:
        pytest.skip("no mkfs.ext4 or losetup")
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    return Device(image, mounted(folder / "disk", "-o", "loop", image))


@pytest.fixture
def device(tmp_path, new_job) -> Iterator[Device]:
    """Jobs end before it is unmounted."""
    made = new_device(tmp_path)
    yield made
    new_job.end()
    unmount(made.path)


@contextlib.contextmanager
def full(disk: Path, free: int) -> Iterator[None]:
    ballast = leave(disk, free)
    yield
    ballast.unlink()


@contextlib.contextmanager
def read_only(disk: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    yield
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


def assert_caught_up(job: Job, step: int) -> None:
    """Storage has the step durable and whole, and nothing of what failed."""
    job.until(lambda: job.persisted(step), f"step {step} durable")
    assert job.stored()[0] == step
    private = job.checkpoint_dir / ".fastckpt"
    kept = {"identity", "writers", "events", "history-1"}
    job.until(lambda: set(os.listdir(private)) <= kept, "a clean directory")


def failures(job: Job) -> int:
    return job.text().count("could not be persisted")


def test_a_disk_full_at_each_moment_of_a_persist_or_read_only_loses_no_memory(disk, new_job, uninterrupted) -> None:
    """Before it begins, in the middle of an image, before the manifest; then remounted read-only."""
    job = new_job(checkpoint_dir=disk / "checkpoints")
    gates = [10, 20, 24, 30, 34, 40, 44, 50, 54]
    job.start("--ballast", "2", "--wait-at", *map(str, gates)).wait_for_all(10)
    assert_caught_up(job, 10)
    sizes = sum(path.stat().st_blocks * 512 for path in (disk / "checkpoints/checkpoint-10").glob("*.pt"))
    waits, stored = iter(gates), [10]
    for trouble in (full(disk, 0), full(disk, MIB), full(disk, sizes), read_only(disk)):
        failed, told = failures(job), len(job.troubles())
        with trouble:
            job.go_on(next(waits))
            job.wait_for_all(stored[-1] // 10 * 10 + 10)
            job.until(lambda failed=failed: failures(job) > failed, "a failure")
            assert job.stored() == stored[::-1], "older ones are whole"
            job.go_on(next(waits))
            job.wait_for_all(stored[-1] // 10 * 10 + 14)
            assert len(job.troubles()) > told, "saves go on, and say it"
        stored.append(stored[-1] // 10 * 10 + 14)
        assert_caught_up(job, stored[-1])
    job.go_on(54)
    assert job.wait() == 0, job.text()
    assert job.stored() == [60, *stored[::-1]]
    assert not job.skips()
    assert any("No space left on device. It needs 2." in text and "Free space there" in text for text in job.troubles())
    assert any("Read-only file system. Remount" in text for text in job.troubles())
    assert_as_if_nothing_had_happened(job, uninterrupted())


def test_a_job_whose_device_is_removed_ends_and_resumes_its_memory_later(device, new_job, uninterrupted) -> None:
    """Training goes on to its end; its memory is kept, and resumed when the device is back, older ones whole on it."""
    job = new_job(checkpoint_dir=device.path / "checkpoints")
    job.start("--steps", "33", "--wait-at", "5", "10", "20", "--disk", "5", FASTCKPT_FLUSH_TIMEOUT="3")
    job.wait_for_all(5)
    assert_caught_up(job, 5)
    job.go_on(5)
    job.wait_for_all(10)
    assert_caught_up(job, 10)
    device.pull_out()
    job.go_on(10)
    job.wait_for_all(20)
    job.until(lambda: "Input/output error" in job.text(), "a failure")
    job.go_on(20)
    assert job.wait() == 0, job.text()
    assert "step 32 of history 1 is in memory only" in job.text()
    assert job.troubles()
    device.put_back()
    assert job.stored() == [10, 5]
    job.run()
    assert job.resumes()[1:] == [(32, "memory")]
    assert job.stored()[0] == job.newest_saved()
    assert_as_if_nothing_had_happened(job, uninterrupted())
