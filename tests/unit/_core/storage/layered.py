"""Deeds on checkpoints in the lower layer of a real overlay, whole and killed before each of their file operations.

``layered.py <folder> <stride>``, as root of a mount namespace of its own; of the operations every so many are tried.
Each deed has an overlay of its own over the same lower layer, which is what a container finds that is started from an
image with checkpoints.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))
from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.unit._core.storage.checkpoints import assert_clean, assert_sound, images, publish
from tests.unit._core.storage.crasher import die_at_operation

OLDEST, OLD, NEWER = SaveId(0, 1), SaveId(0, 7), SaveId(0, 8)
NEW = SaveId(1, 7)
Deed = Callable[[CheckpointDirectory], object]


def make_image(lower: Path) -> None:
    """What the image has: checkpoints by step, one with a file of its own, one in a directory that its user named."""
    directory = CheckpointDirectory(lower / "dir")
    publish(directory, OLDEST)
    publish(directory, OLD)
    publish(directory, NEWER, str(lower / "dir/user/ckpt.pt"))
    publish(directory, SaveId(0, 9), f"{lower}/dir/best/")
    publish(directory, SaveId(0, 10))
    (lower / "dir/checkpoint-11").mkdir()
    (lower / "dir/checkpoint-11/theirs").write_text("theirs")
    for source in lower.glob("image-*"):
        shutil.rmtree(source)


@contextmanager
def container(folder: Path) -> Iterator[CheckpointDirectory]:
    """A fresh container from the image, at a path that is that of the image's files, as in one."""
    upper, work, merged = (folder / name for name in ("upper", "work", "lower"))
    for path in (upper, work):
        path.mkdir()
    options = f"lowerdir={merged},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], check=True)
    try:
        yield CheckpointDirectory(merged / "dir")
    finally:
        subprocess.run(["umount", str(merged)], check=True)
        for path in (upper, work):
            shutil.rmtree(path)


def killed_at(number: int, deed: Deed, directory: CheckpointDirectory) -> bool:
    """Do a deed in a child that is killed before its file operation of that number; whether it came to that."""
    child = os.fork()
    if child == 0:
        die_at_operation(number, str(directory.path))
        deed(directory)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status != 0


def at_every_operation(
    folder: Path, stride: int, deed: Deed, check: Callable[[CheckpointDirectory, bool], None]
) -> None:
    """Those on the way, and that none is left when the deed is done."""
    number, killed = 1 - stride, True
    while killed:
        number += stride
        with container(folder) as directory:
            killed = killed_at(number, deed, directory)
            check(directory, killed)
    assert number > 10
    print(f"killed before each of {number} operations", flush=True)


def save(id: SaveId, target: str = "") -> tuple[Deed, Callable[[CheckpointDirectory, bool], None]]:
    """A save over what is in the image; and what must hold after it."""

    def deed(directory: CheckpointDirectory) -> None:
        named = target and f"{directory.path.parent}/{target}"
        directory.publish(PublishRequest(id, SOURCES[id], target=named))

    def check(directory: CheckpointDirectory, killed: bool) -> None:
        found = assert_sound(CheckpointDirectory(directory.path))
        assert found[0] == id or (killed and found[0] == SaveId(0, 10)), found
        assert {OLDEST, *found[:1]} <= {*found}
        directory.sweep()
        assert assert_sound(directory)[0] == found[0]
        assert directory.sweep() == []
        assert_clean(directory)
        deed(directory)
        assert assert_sound(directory)[0] == id
        assert_clean(directory)
        assert [path.read_text() for path in directory.path.rglob("theirs")][:1] == ["theirs"]

    return deed, check


def delete(id: SaveId) -> tuple[Deed, Callable[[CheckpointDirectory, bool], None]]:
    def deed(directory: CheckpointDirectory) -> None:
        directory.delete(id)

    def check(directory: CheckpointDirectory, killed: bool) -> None:
        found, others = assert_sound(CheckpointDirectory(directory.path)), {OLDEST, SaveId(0, 10)}
        assert others <= {*found} and (killed or id not in found)
        directory.sweep()
        assert assert_sound(directory) == found
        deed(directory)
        assert id not in assert_sound(directory) and others <= {*found}
        assert_clean(directory)
        assert (directory.path / "user/ckpt.pt").exists() == (id != NEWER)

    return deed, check


def set_aside() -> tuple[Deed, Callable[[CheckpointDirectory, bool], None]]:
    def deed(directory: CheckpointDirectory) -> None:
        [bad] = [stored for stored in directory.checkpoints() if stored.id == OLD]
        directory.quarantine(bad, "it is bad")

    def check(directory: CheckpointDirectory, killed: bool) -> None:
        scan = CheckpointDirectory(directory.path).scan()
        assert scan.damaged == []
        here, aside = OLD in [stored.id for stored in scan.places], [why for _, why in scan.quarantined]
        assert (here or aside) and aside in ([], ["it is bad"]) and (killed or not here)
        for place, _ in scan.quarantined:
            assert (place / "rank_0.pt").read_bytes() == b"0.7 rank"
        directory.sweep()
        assert_clean(directory)

    return deed, check


DEEDS = {
    "save over a step": lambda: save(NEW),
    "save over a file": lambda: save(SaveId(1, 8), "dir/user/ckpt.pt"),
    "save over a directory": lambda: save(SaveId(1, 9), "dir/best/"),
    "save over another's directory": lambda: save(SaveId(1, 11)),
    "delete a step": lambda: delete(OLD),
    "delete a file": lambda: delete(NEWER),
    "delete a directory": lambda: delete(SaveId(0, 9)),
    "set aside": set_aside,
}
SOURCES: dict[SaveId, dict[str, Path]] = {}


def main(folder: Path, stride: int) -> None:
    make_image(folder / "lower")
    for id in (NEW, SaveId(1, 8), SaveId(1, 9), SaveId(1, 11)):
        SOURCES[id] = images(folder / f"source-{id.step}", id)
    with container(folder) as directory:
        try:
            (directory.path / "checkpoint-7").rename(directory.path / "checkpoint-70")
        except OSError as error:
            assert error.errno == errno.EXDEV
        else:
            sys.exit("a directory of the lower layer can be renamed here: redirect_dir is on")
    for name, make in DEEDS.items():
        print(name, flush=True)
        at_every_operation(folder, stride, *make())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
