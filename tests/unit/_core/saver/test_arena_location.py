"""Where copies of other nodes' files may be kept."""

import subprocess
from pathlib import Path

import pytest

from fastckpt._core.config import Settings
from fastckpt._core.saver.arena_location import copies_place
from fastckpt.errors import ConfigError


@pytest.mark.parametrize("what", ["missing", "read-only", "in checkpoints"])
def test_a_directory_that_cannot_keep_copies_is_refused_with_its_name_and_the_remedy(tmp_path: Path, what: str) -> None:
    directory, checkpoints = tmp_path / "nvme", tmp_path / "checkpoints"
    why = {"missing": "No such file or directory", "read-only": "it cannot be written to"}
    if what == "read-only":
        directory.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(directory)]  # root may write everywhere else
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("cannot mount a tmpfs")
    elif what == "in checkpoints":
        directory = checkpoints / "nvme"
        directory.mkdir(parents=True)
    expected = rf"{directory}.*{why.get(what, 'is in the checkpoint directory')}.*--fast-replica-medium disk:DIR"
    try:
        with pytest.raises(ConfigError, match=expected):
            copies_place(Settings(replica_medium=f"disk:{directory}"), str(checkpoints))
    finally:
        if what == "read-only":
            subprocess.run(["umount", directory], check=True)


def test_a_directory_of_this_host_may_keep_copies_whatever_link_leads_to_it(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    (tmp_path / "link").symlink_to("nvme")
    place = copies_place(Settings(replica_medium=f"disk:{tmp_path}/link"), str(tmp_path / "checkpoints"))
    assert place == (tmp_path / "nvme").resolve()
    assert copies_place(Settings()) is None and copies_place(Settings(), "s3://bucket/checkpoints") is None
    assert copies_place(Settings(replica_medium=f"disk:{tmp_path}"), "s3://bucket/checkpoints") == tmp_path.resolve()
