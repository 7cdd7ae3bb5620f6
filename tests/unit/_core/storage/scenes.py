"""Directories to publish one more checkpoint to; each says which, and at what path."""

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.local.layout import TRACKER
from tests.unit._core.storage.checkpoints import publish

OLDEST, OLD, NEW = SaveId(0, 1), SaveId(0, 7), SaveId(1, 7)
FILE, WITHIN, BEST = "dir/ckpt.pt", "dir/checkpoint-7/sub/mine.pt", "dir/best/"

SCENES: dict[str, tuple[str, SaveId, str]] = {
    "default": ("", SaveId(0, 8), ""),
    "another_history": ("", NEW, ""),
    "again": ("", OLD, ""),
    "strangers_directory": ("", SaveId(0, 9), ""),
    "tracker_in_trouble": ("", NEW, ""),
    "new_target": ("", NEW, "user/ckpt.pt"),
    "target_overwritten": (FILE, NEW, FILE),
    "target_again": (FILE, OLD, FILE),
    "target_within": (WITHIN, NEW, WITHIN),
    "new_directory": ("", NEW, "dir/global_step7/"),
    "directory_overwritten": (BEST, NEW, BEST),
}
"""The path at which the older checkpoint was saved, then the newer one's id and path; those of users are not empty."""


def prepare(scene: str, directory: CheckpointDirectory) -> tuple[SaveId, str]:
    """Have what was there before; returns what is to be published, and at what path."""
    before, id, target = SCENES[scene]
    root = directory.path.parent
    publish(directory, OLDEST)
    publish(directory, OLD, before and f"{root}/{before}")
    if scene == "strangers_directory":  # one of another tool has the name
        (directory.path / "checkpoint-9").mkdir()
        (directory.path / "checkpoint-9/theirs").write_text("theirs")
    if scene == "tracker_in_trouble":  # it cannot be written, which nobody minds
        (directory.path / TRACKER).unlink()
        (directory.path / TRACKER).mkdir()
    return id, target and f"{root}/{target}"
