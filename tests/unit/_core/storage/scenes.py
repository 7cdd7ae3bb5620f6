"""Directories to publish one more checkpoint to; each says which, and at what path."""

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local.layout import TRACKER
from tests.unit._core.storage.checkpoints import publish

OLDEST, OLD, NEW = SaveId(0, 1), SaveId(0, 7), SaveId(1, 7)


def default(directory):
    """A new step beside older ones."""
    publish(directory, OLD)
    return SaveId(0, 8), ""


def another_history(directory):
    """A step that an earlier history has, too."""
    publish(directory, OLD)
    return NEW, ""


def again(directory):
    """The very same id."""
    publish(directory, OLD)
    return OLD, ""


def strangers_directory(directory):
    """A directory of another tool has the name."""
    publish(directory, OLD)
    (directory.path / "checkpoint-9").mkdir()
    (directory.path / "checkpoint-9/theirs").write_text("theirs")
    return SaveId(0, 9), ""


def tracker_in_trouble(directory):
    """The tracker cannot be written, which nobody minds, and a step that an earlier history has, too."""
    publish(directory, OLD)
    tracker = directory.path / TRACKER
    tracker.unlink()
    tracker.mkdir()
    return NEW, ""


def new_target(directory):
    publish(directory, OLD)
    return NEW, str(directory.path.parent / "user/ckpt.pt")


def target_overwritten(directory):
    """The user saves to the same file each time; sizes are equal."""
    target = str(directory.path / "ckpt.pt")
    publish(directory, OLD, target)
    return NEW, target


def target_again(directory):
    target = str(directory.path / "ckpt.pt")
    publish(directory, OLD, target)
    return OLD, target


def target_within(directory):
    """The user names a file in the directory that the step's checkpoint has anyway."""
    target = str(directory.path / "checkpoint-7/sub/mine.pt")
    publish(directory, OLD, target)
    return NEW, target


def new_directory(directory):
    """The user named the directory of all files."""
    publish(directory, OLD)
    return NEW, f"{directory.path}/global_step7/"


def directory_overwritten(directory):
    """The user names the same directory each time."""
    target = f"{directory.path}/best/"
    publish(directory, OLD, target)
    return NEW, target


SCENES = [
    default,
    another_history,
    again,
    strangers_directory,
    tracker_in_trouble,
    new_target,
    target_overwritten,
    target_again,
    target_within,
    new_directory,
    directory_overwritten,
]
