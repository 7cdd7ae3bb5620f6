"""Files and directories that users named, inside the checkpoint directory and outside, once or again and again."""

import shutil
import subprocess

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt.errors import ConfigError, PersistError
from tests.support.small_disks import mounted, unmount
from tests.unit._core.storage.checkpoints import assert_clean, assert_named, assert_sound, ids, images, publish

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(params=["inside", "outside", "elsewhere"])
def target(request, directory, fast_path, tmp_path):
    """On another file system there is no link, but a copy."""
    places = {"inside": directory.path, "outside": fast_path / "user/folder", "elsewhere": tmp_path / "user"}
    assert tmp_path.stat().st_dev != fast_path.stat().st_dev
    return places[request.param] / "ckpt.pt"


def test_a_model_file_is_at_the_path_that_its_user_named_for_each_step(directory, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(b"theirs")
    publish(directory, SaveId(0, 7), str(target))
    [stored] = directory.checkpoints()
    assert stored.path == target and stored.owns_target()
    assert stored.path_of("model.pt") == directory.path / "checkpoint-7/model.pt"
    assert target.read_bytes() == stored.path_of("model.pt").read_bytes()
    assert not target.is_symlink() and target.samefile(stored.path_of("model.pt")) == (target.parent.name != "user")
    assert stored.manifest.target == ("ckpt.pt" if target.parent == directory.path else str(target))
    assert assert_sound(directory) == [(0, 7)]
    for id in [SaveId(0, 8), SaveId(1, 8)]:
        publish(directory, id, str(target))
        assert assert_sound(directory) == [id]
    # A path for each step is deleted with its checkpoint if it is in the directory; one outside is its user's.
    for step in (1, 2, 3):
        publish(directory, SaveId(2, step), str(target.with_name(f"ckpt-{step}.pt")))
    directory.delete(SaveId(2, 1))
    assert assert_sound(directory) == [(2, 3), (2, 2), (1, 8)] and not (directory.path / "checkpoint-1").exists()
    assert target.with_name("ckpt-1.pt").exists() == (target.parent != directory.path)
    assert_clean(directory)


def test_a_reused_path_is_not_deleted_with_the_older_checkpoint(directory, target, fast_path):
    """Nor where its bytes are those of the older one."""
    publish(directory, SaveId(0, 1))
    old, new = SaveId(0, 5), SaveId(0, 6)
    publish(directory, old, str(target))
    shutil.copytree(directory.path / "checkpoint-5", fast_path / "kept")
    directory.publish(PublishRequest(new, images(fast_path / "source", old), target=str(target)))
    publish(directory, SaveId(0, 9))
    shutil.copytree(fast_path / "kept", directory.path / "checkpoint-5")  # as if a crash had kept it
    shutil.copytree(fast_path / "kept", directory.path / ".fastckpt/deleted-1234")  # or had interrupted its deletion
    assert ids(directory) == [(0, 9), (0, 6), (0, 1)] and directory.scan().damaged == []
    directory.delete(old)
    directory.sweep()
    assert ids(directory) == [(0, 9), (0, 6), (0, 1)]
    assert not (directory.path / "checkpoint-5").exists() and directory.checkpoints()[1].owns_target()
    assert_clean(directory)


def test_a_target_replaced_by_the_user_stays_and_the_checkpoint_counts_by_its_directory(directory, target):
    publish(directory, SaveId(0, 5), str(target))
    assert directory.checkpoints()[0].path == target
    publish(directory, SaveId(0, 6))
    target.unlink()
    directory.sweep()
    assert not target.exists()
    for _ in range(2):
        assert directory.checkpoints()[1].path == directory.path / "checkpoint-5"
        assert assert_sound(directory) == [(0, 6), (0, 5)]
        target.write_bytes(b"theirs")
    directory.sweep()
    directory.delete(SaveId(0, 5))
    assert target.read_bytes() == b"theirs" and assert_sound(directory) == [(0, 6)]


def test_a_target_that_cannot_be_removed_is_an_error_and_removed_by_a_later_sweep(directory):
    directory.path.mkdir()
    mount = mounted(directory.path / "mount", "-t", "tmpfs", "-o", "size=64k", "none")
    publish(directory, SaveId(0, 4), str(mount / "a.pt"))
    publish(directory, SaveId(0, 5))
    subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
    with pytest.raises(PersistError, match=f"cannot delete step 4 .*{mount}/a.pt: Read-only"):
        directory.delete(SaveId(0, 4))
    assert assert_sound(directory) == [(0, 5)] and directory.sweep() == []
    subprocess.run(["mount", "-o", "remount,rw", mount], check=True)
    assert len(directory.sweep()) == 1 and not (mount / "a.pt").exists()
    assert_clean(directory)
    unmount(mount)


def test_a_write_through_a_hard_linked_target_is_damage_and_a_sweep_bears_that_its_directory_is_gone(directory, target):
    target = target.with_name("sub") / "ckpt.pt"
    publish(directory, SaveId(0, 5))
    publish(directory, SaveId(0, 6), str(target))
    is_link = target.samefile(directory.path / "checkpoint-6/model.pt")
    target.write_bytes(b"another size")
    found = [(0, 5)] if is_link else [(0, 6), (0, 5)]
    assert ids(directory) == found
    assert [path for path, _ in directory.scan().damaged] == [directory.path / "checkpoint-6"] * is_link
    directory.sweep()
    assert target.read_bytes() == b"another size"
    shutil.rmtree(target.parent)
    for _ in range(2):
        (directory.path / ".fastckpt/tmp-1234").mkdir()
        directory.sweep()
        assert ids(directory) == found
        assert_clean(directory)
        target.parent.touch()  # nor does a file in its place matter


REFUSED = {
    "checkpoint-7": r"own directory has that name. Try .*/checkpoint-7\.pt",
    "checkpoint-6/mine.pt": "cannot save .*mine.pt",
    "checkpoint-7/rank_0.pt": "cannot save .*rank_0.pt",
    "checkpoint-7/manifest.json": "cannot save .*manifest.json.*part of a checkpoint",
    "checkpoint-6/model.pt": "part of a checkpoint",
    "checkpoint-8/deep/model.pt": "part of a checkpoint",
    ".fastckpt/x.pt": "part of a checkpoint",
    TRACKER: "part of a checkpoint",
}


def test_a_path_of_another_file_of_a_checkpoint_is_refused_and_one_in_its_directory_is_one_more_name(directory):
    publish(directory, SaveId(0, 6))
    for path, why in REFUSED.items():
        with pytest.raises(ConfigError, match=why):
            publish(directory, SaveId(0, 7), str(directory.path / path))
    assert assert_sound(directory) == [(0, 6)] and not (directory.path / "checkpoint-7").exists()
    assert_clean(directory)
    (directory.path / "checkpoint-7").mkdir()  # an empty directory that the user made for it is used
    for step, name in ((7, "mine.pt"), (8, "sub/mine.pt"), (9, "model.pt")):
        publish(directory, SaveId(0, step), f"{directory.path}/checkpoint-{step}/{name}")
        stored = directory.checkpoints()[0]
        assert (directory.path / f"checkpoint-{step}/{name}").samefile(stored.path_of("model.pt"))
        assert stored.owns_target() == bool(stored.manifest.target) == (step < 9)
    assert assert_sound(directory) == [(0, 9), (0, 8), (0, 7), (0, 6)]
    assert_named(directory.scan())


def test_what_an_early_version_left_is_refused_by_name_and_not_obeyed(directory):
    """The model was at the user's path alone, and a draft of it was moved to the path that a record named."""
    target = directory.path / "ckpt.pt"
    draft = target.with_name(".fastckpt-0123456789ab")
    for step in (5, 6, 7):
        publish(directory, SaveId(0, step), str(target) if step == 6 else "")
    record = (directory.path / "checkpoint-6").rename(directory.path / ".fastckpt/checkpoint-0-6")
    (record / "model.pt").unlink()
    (record / "draft").write_text(str(draft))
    draft.write_bytes(b"due")
    before = target.read_bytes()
    for _ in range(2):
        assert ids(directory) == [(0, 7), (0, 5)]
        [(path, why)] = directory.scan().damaged
        assert path == record and "early version" in why
        directory.sweep()
    assert target.read_bytes() == before and draft.read_bytes() == b"due"


def test_links_outside_are_followed_as_by_torch_save_and_those_in_the_directory_are_not(directory, target, fast_path):
    """Whoever can write to the directory could have put them there."""
    target.parent.mkdir(parents=True)
    target.symlink_to(fast_path / "real.pt")
    publish(directory, SaveId(0, 5), str(target))
    is_outside = target.parent != directory.path
    assert target.is_symlink() == (fast_path / "real.pt").exists() == is_outside
    assert directory.checkpoints()[0].path == (fast_path / "real.pt" if is_outside else target)
    (directory.path / "away").symlink_to(fast_path)
    with pytest.raises(PersistError, match=r"dir/away.*is a link, which is not followed"):
        publish(directory, SaveId(0, 6), str(directory.path / "away/real.pt"))
    (fast_path / "way").symlink_to(directory.path)
    publish(directory, SaveId(0, 7), str(fast_path / "way/mine.pt"))
    assert directory.checkpoints()[0].manifest.target == "mine.pt"
    assert_sound(directory)


# --- directories that users named for all files of a checkpoint


def test_one_directory_name_for_all_steps_is_overwritten_and_one_for_each_is_deleted_with_its_step(directory):
    for id in [SaveId(0, 5), SaveId(0, 6), SaveId(1, 6)]:
        publish(directory, id, f"{directory.path}/best/")
        assert assert_sound(directory) == [id]
    for name in ("best/", "global_step7/", ""):
        publish(directory, SaveId(1, 7), name and f"{directory.path}/{name}")
    places = {stored.path.name: stored for stored in directory.scan().places}
    assert places.keys() == {"best", "global_step7", "checkpoint-7"}
    named = places["global_step7"]
    assert (named.target, named.path_of("model.pt")) == (None, directory.path / "global_step7/model.pt")
    assert named.manifest.target == "global_step7/"
    publish(directory, SaveId(1, 8))
    directory.delete(SaveId(1, 7))
    assert assert_sound(directory) == [(1, 8)] and not named.path.exists()
    assert_clean(directory)


def test_a_directory_at_the_target_and_directory_names_that_would_not_be_found_are_refused(directory, target):
    publish(directory, SaveId(0, 5))
    (target / "theirs").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"ckpt\.pt: it is a directory"):
        publish(directory, SaveId(0, 6), str(target))
    assert assert_sound(directory) == [(0, 5)] and not (directory.path / "checkpoint-6").exists()
    assert_clean(directory)
    for name in ("a/b/", "../other/", ".hidden/", "checkpoint-8/", f"{TRACKER}/"):
        with pytest.raises(ConfigError, match="the directory of step 7 must be in"):
            publish(directory, SaveId(0, 7), f"{directory.path}/{name}")
    publish(directory, SaveId(0, 7), f"{directory.path}/checkpoint-7/")
    assert [stored.manifest.target for stored in directory.checkpoints()] == ["", ""]
