"""Where copies of other nodes' files may be kept."""

from pathlib import Path

import pytest

from fastckpt._core.config import Settings
from fastckpt._core.saver.arena_location import copies_place
from fastckpt.errors import ConfigError
from tests.support.small_disks import mounted, unmount


def test_a_directory_that_cannot_keep_copies_is_refused_with_its_name_and_the_remedy(tmp_path: Path) -> None:
    missing, checkpoints = tmp_path / "nvme", tmp_path / "checkpoints"
    (inside := checkpoints / "nvme").mkdir(parents=True)
    fixed = mounted(tmp_path / "read-only", "-t", "tmpfs", "-o", "ro", "tmpfs")  # root may write everywhere else
    refused = {missing: "No such file", inside: "is in the checkpoint directory", fixed: "it cannot be written to"}
    try:
        for directory, why in refused.items():
            with pytest.raises(ConfigError, match=rf"{directory}.*{why}.*--fast-replica-medium disk:DIR"):
                copies_place(Settings(replica_medium=f"disk:{directory}"), str(checkpoints))
    finally:
        unmount(fixed)


def test_a_directory_of_this_host_may_keep_copies_whatever_link_leads_to_it(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    (tmp_path / "link").symlink_to("nvme")
    place = copies_place(Settings(replica_medium=f"disk:{tmp_path}/link"), str(tmp_path / "checkpoints"))
    assert place == (tmp_path / "nvme").resolve()
    assert copies_place(Settings()) is None and copies_place(Settings(), "s3://bucket/checkpoints") is None
    assert copies_place(Settings(replica_medium=f"disk:{tmp_path}"), "s3://bucket/checkpoints") == tmp_path.resolve()
