"""Checkpoints that came with the image of a container: replaced and deleted on a real overlay."""

import errno
import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[4]))
from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.faults.own_disk import UNSHARE, needs_mounts
from tests.file_systems.kills import NEW, OLD, OLDER, killed_at
from tests.unit._core.storage.checkpoints import assert_clean, assert_sound, publish


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.campaign)])
def test_each_operation_killed_anywhere_on_an_overlay_is_done_or_not(fast_path: Path, stride: int) -> None:
    needs_mounts()
    command = [*UNSHARE, sys.executable, __file__, str(fast_path), str(stride)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def container(folder: Path) -> Iterator[CheckpointDirectory]:
    """A fresh container from an image, at a path that is that of the image's files, as in one."""
    upper, work, merged = (folder / name for name in ("upper", "work", "lower"))
    upper.mkdir()
    work.mkdir()
    options = f"lowerdir={merged},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], check=True)
    try:
        with pytest.raises(OSError) as refused:  # else redirect_dir is on
            (merged / "dir/checkpoint-6").rename(merged / "dir/checkpoint-70")
        assert refused.value.errno == errno.EXDEV
        yield CheckpointDirectory(merged / "dir")
    finally:
        subprocess.run(["umount", str(merged)], check=True)
        shutil.rmtree(upper)
        shutil.rmtree(work)


def main(folder: Path, stride: int) -> None:
    """As root of a mount namespace of its own; of the operations every so many are tried."""
    image = CheckpointDirectory(folder / "lower/dir")
    for id in (OLDER, OLD):
        publish(image, id)
    for source in image.path.parent.glob("image-*"):
        shutil.rmtree(source)
    for number in itertools.count(1, stride):
        with container(folder) as directory:
            killed = killed_at(number, directory)
            found = assert_sound(CheckpointDirectory(directory.path))
            assert found in ([NEW, OLDER], [NEW, OLD, OLDER], [NEW], [OLD, OLDER]) if killed else found == [NEW]
            directory.sweep()
            assert assert_sound(directory)[0] == found[0]
            assert directory.sweep() == []
            publish(directory, NEW)
            directory.delete(OLDER)
            assert assert_sound(directory) == [NEW]
            assert_clean(directory)
        if not killed:
            break
    assert number > 20


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
