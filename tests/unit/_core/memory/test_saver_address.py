"""Discovery of the saver without a launcher of ours, also against files of another user."""

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from fastckpt._core.ipc.channel import Channel
from fastckpt._core.memory.saver_address import SaverAddress, find
from fastckpt.errors import AgentLost, ArenaTooSmall, FastckptError
from tests.support.other_users import NOBODY, as_nobody
from tests.unit._core.memory.conftest import killed

KEY = "0" * 24


@pytest.fixture
def shm(shm: Path) -> Path:
    """As /dev/shm is: every user can make files there."""
    shm.chmod(0o1777)
    return shm


def test_a_saver_is_found_while_it_lives_and_a_second_one_of_its_launch_refused(shm: Path):
    def post() -> None:
        SaverAddress(shm, KEY, "@dead")
        assert find(shm, KEY, 5) == "@dead"

    killed(post)
    with pytest.raises(AgentLost, match=f"has posted no address under {shm} in 0 s"):
        find(shm, KEY, 0)
    with contextlib.ExitStack() as postings:
        postings.callback(SaverAddress(shm, KEY, "@one").close)
        assert len(list(shm.iterdir())) == 1
        postings.callback(SaverAddress(shm, "1" * 24, "@other").close)
        with pytest.raises(FastckptError, match="the same MASTER_ADDR and MASTER_PORT; give this one others"):
            SaverAddress(shm, KEY, "@two")
        assert find(shm, KEY, 5) == "@one" and find(shm, "1" * 24, 5) == "@other"
    with pytest.raises(AgentLost):
        find(shm, KEY, 0)
    assert not any(shm.iterdir())


def test_files_that_are_no_postings_are_passed_over(shm: Path):
    """A link to one of another launch, a pipe, a directory, a file of this user that nobody has locked."""
    posting = SaverAddress(shm, "1" * 24, "@other")
    (true,) = shm.iterdir()
    names = [shm / f"fastckpt-{os.getuid()}-saver-{KEY}-{number}" for number in range(5)]
    os.link(true, names[0])
    names[1].symlink_to(true)
    os.mkfifo(names[2])
    names[3].mkdir()
    names[4].write_text(f"{names[4].name} @nobody")
    with pytest.raises(AgentLost):
        find(shm, KEY, 0)
    SaverAddress(shm, KEY + "0", "@here").close()
    posting.close()
    for path in shm.iterdir():
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_posting_an_address_in_full_memory_is_an_error_with_a_remedy(small_tmpfs: Callable[[int], Path]):
    full = small_tmpfs(1)
    (full / "ballast").write_bytes(bytes(1 << 20))
    with pytest.raises(ArenaTooSmall, match=r"nothing can be written under .*No space left.*--shm-size"):
        SaverAddress(full, KEY, "@here")
    assert [path.name for path in full.iterdir()] == ["ballast"]
    (full / "ballast").unlink()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_postings_and_sockets_of_another_user_are_passed_over(shm: Path):
    """It has taken what can be guessed, before the job begins."""
    decoy, folder = shm / f"fastckpt-0-saver-{KEY}-{'f' * 16}", shm / f"fastckpt-0-saver-{KEY}"
    with socket.socket(socket.AF_UNIX) as listener:
        with as_nobody():
            decoy.write_text(f"{decoy.name} @fastckpt-decoy")
            folder.mkdir()
            listener.bind("\0fastckpt-decoy")
            listener.listen(1)  # and nobody is ever answered
        with pytest.raises(AgentLost):
            find(shm, KEY, 0)
        posting = SaverAddress(shm, KEY, "@here")
        assert find(shm, KEY, 5) == "@here"
        posting.close()
        with pytest.raises(AgentLost, match=f"belongs to user {NOBODY}, not to {os.getuid()}"):
            Channel("@fastckpt-decoy", 30)
    decoy.unlink()
    folder.rmdir()
