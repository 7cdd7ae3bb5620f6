"""Deeds on checkpoints in the lower layer of a real overlay, whole and killed before each of their file operations.

``layered.py <folder> <stride>``, as root of a mount namespace of its own; of the operations every so many are tried.
Each time there is another overlay over the same lower layer, which is what a container finds that is started from an
image with checkpoints.
"""

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))
from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.unit._core.storage.checkpoints import assert_clean, assert_sound, publish
from tests.unit._core.storage.crasher import act
from tests.unit._core.storage.scenes import OLD, OLDEST, prepare
from tests.unit._core.storage.test_crash import check_after_sweep

NEWEST = SaveId(0, 10)
DEEDS = [
    ("publish", "another_history"),
    ("publish", "target_overwritten"),
    ("publish", "directory_overwritten"),
    ("publish", "strangers_directory"),
    ("delete", "default"),
    ("delete", "target_overwritten"),
    ("delete", "directory_overwritten"),
    ("quarantine", "default"),
]


def make_image(lower: Path, deed: str, scene: str) -> tuple[SaveId, str]:
    """What the image has; returns what the deed concerns."""
    id, target = prepare(scene, CheckpointDirectory(lower / "dir"))
    if deed != "publish":
        publish(CheckpointDirectory(lower / "dir"), NEWEST)
    for source in lower.glob("image-*"):
        shutil.rmtree(source)
    return (id, target) if deed == "publish" else (OLD, "")


@contextmanager
def container(folder: Path) -> Iterator[CheckpointDirectory]:
    """A fresh container from the image, at a path that is that of the image's files, as in one."""
    upper, work, merged = (folder / name for name in ("upper", "work", "lower"))
    upper.mkdir()
    work.mkdir()
    options = f"lowerdir={merged},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], check=True)
    try:
        try:
            (merged / "dir/checkpoint-1").rename(merged / "dir/checkpoint-70")
        except OSError as error:
            assert error.errno == errno.EXDEV
        else:
            sys.exit("a directory of the lower layer can be renamed here: redirect_dir is on")
        yield CheckpointDirectory(merged / "dir")
    finally:
        subprocess.run(["umount", str(merged)], check=True)
        shutil.rmtree(upper)
        shutil.rmtree(work)


def was_killed(**request: object) -> bool:
    """Do a deed in a child that is killed before one of its file operations; whether it came to that."""
    child = os.fork()
    if child == 0:
        act(request)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status != 0


def check(deed: str, directory: CheckpointDirectory, id: SaveId, target: str, killed: bool) -> None:
    """The deed is done or not; what is left of it goes with a sweep, and it can be repeated."""
    found = assert_sound(CheckpointDirectory(directory.path))
    if deed == "publish":
        assert (found[0] == id or (killed and found[0] == OLD)) and OLDEST in found
        check_after_sweep(directory, found, id, target, copies=2)
        return
    assert {OLDEST, NEWEST} <= {*found} and (killed or OLD not in found)
    aside = directory.scan().quarantined
    assert OLD in found or deed == "delete" or [why for _, why in aside] == ["it is bad"]
    assert all((place / "rank_0.pt").read_bytes() == b"0.7 rank" for place, _ in aside)
    directory.sweep()
    assert assert_sound(directory) == found
    directory.delete(OLD)
    assert assert_sound(directory) == [NEWEST, OLDEST] and not (directory.path / "ckpt.pt").exists()
    assert_clean(directory) if deed == "delete" else directory.sweep()


def main(folder: Path, stride: int) -> None:
    for deed, scene in DEEDS:
        root = folder / f"{deed}-{scene}"
        id, target = make_image(root / "lower", deed, scene)
        for number in itertools.count(1, stride):
            with container(root) as directory:
                killed = was_killed(root=str(directory.path), deed=deed, id=id, target=target, operation=number)
                check(deed, directory, id, target, killed)
            if not killed:
                break
        assert number > 10
        print(f"killed before each of {number} operations", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
