"""Without a launcher of ours the first local rank has the saver."""

import os
from pathlib import Path

import pytest

from fastckpt.ddp import DdpCheckpointer, StorageType
from tests.e2e.ddp.conftest import on_storage, run_script, state

DISK, MEMORY = StorageType.DISK, StorageType.MEMORY


def no_arena() -> bool:
    return not any(Path(os.environ["FASTCKPT_SHM_DIR"]).iterdir())


def test_a_script_without_a_launcher_warns_once_and_close_waits_for_the_last_flush(directory, said):
    with DdpCheckpointer(directory) as one, DdpCheckpointer(directory.with_name("other")) as other:
        assert one.save_checkpoint(1, state(1), storage_type=DISK)
        assert other.save_checkpoint(5, state(5), storage_type=MEMORY)
        assert one.load_checkpoint()["step"] == 1 and one.loaded_from == "memory"
        one.save_checkpoint(2, state(2), storage_type=MEMORY)
    assert said.text.count("not started by fastckpt-run") == 1
    assert on_storage(directory)[-1] == 2 and no_arena()
    with DdpCheckpointer(directory) as one:
        assert one.load_checkpoint()["step"] == 2 and one.loaded_from == "storage"


UNCLOSED = """
import multiprocessing, sys, torch
from fastckpt.ddp import DdpCheckpointer
from fastckpt._core.saver import server as saver
saver.WRITERS_TIMEOUT = 600
checkpointer = DdpCheckpointer(sys.argv[1])
checkpointer.save_checkpoint(1, {"weights": torch.ones(10)})
child = multiprocessing.get_context("fork").Process(target=print, args=("child",))
child.start()
child.join(60)
assert child.exitcode == 0
"""


def test_a_script_without_a_launcher_that_does_not_close_flushes_at_its_end(tmp_path, forked_launchers):
    """Also one whose forked children have ended before."""
    directory = tmp_path / "checkpoints"
    said = run_script(UNCLOSED + "raise RuntimeError('wrong')", tmp_path, str(directory), expected=1)
    assert on_storage(directory) == [1] and no_arena(), said


CLOSES_DESCRIPTORS = """
import os, socket, sys, time
import torch
from fastckpt.ddp import DdpCheckpointer
checkpointer = DdpCheckpointer(sys.argv[1])
checkpointer.save_checkpoint(1, {"weights": torch.ones(10)})
checkpointer.wait_latest_checkpoint(60)
time.sleep(1)  # the end of what a thread does for the saver would be told by the number of a descriptor
os.closerange(3, 256)
pairs = [socket.socketpair() for _ in range(8)]
assert pairs[0][0].fileno() == 3
files = [open(f"{sys.argv[2]}/{number}", "w") for number in range(8)]
for file in files:
    file.write("own")
result = checkpointer.save_checkpoint(2, {"weights": torch.ones(10)})
assert not result and "this script has closed descriptor" in result.reason, result
checkpointer.close()
for end in (end for pair in pairs for end in pair):
    end.setblocking(False)
    try:
        raise SystemExit(f"descriptor {end.fileno()} got {end.recv(10)!r}")  # b"": the other end was closed
    except BlockingIOError:
        pass
if not os.fork():
    os._exit(any(not os.path.exists(f"/proc/self/fd/{file.fileno()}") for file in files))
assert os.wait()[1] == 0, "the fork has closed files of the script"
"""


@pytest.mark.parametrize("has_launcher", [True, False], ids=["a saver elsewhere", "a saver of its own"])
def test_a_script_that_closes_all_descriptors_keeps_those_that_it_opens_then(
    ranks, directory, tmp_path, forked_launchers, has_launcher
):
    if has_launcher:
        ranks.start(0)
    assert "Error" not in run_script(CLOSES_DESCRIPTORS, tmp_path, str(directory), str(tmp_path))
    assert {(tmp_path / str(number)).read_text() for number in range(8)} == {"own"}
    ranks.workers_die() if has_launcher else None
    ranks.start_workers() if has_launcher else ranks.start()  # what the script had saved is there
    assert [loaded["weights"].tolist() for loaded in ranks.load()] == [[1.0] * 10]
