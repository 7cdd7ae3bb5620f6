"""The saver of plain torchrun, in the first rank's process: its wait for other ranks at exit."""

import multiprocessing
import time
from pathlib import Path
from typing import Any

from fastckpt._core import in_process_saver
from fastckpt._core.client.connection import SaverClient
from fastckpt._core.client.save_results import TO_MEMORY
from fastckpt._core.client.saver_options import saver_options
from fastckpt._core.config import RankInfo, Settings
from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.saver import server
from fastckpt._core.saver.server import Saver
from tests.e2e.ddp.conftest import on_storage


def join(directory: Path, rank: int) -> SaverClient:
    place = RankInfo(rank=rank, local_rank=rank, world_size=2, local_world_size=2, master="launch:1")
    address = in_process_saver.saver_address(place, Settings.from_environment())
    return SaverClient(saver_options(str(directory), None, "never"), place, address)


def begin(link: SaverClient, step: int) -> slots.SlotDone:
    rank, id = link.place.rank, SaveId(link.history, step)
    link.begin(id, {f"rank_{rank}.pt": 4096})
    return slots.SlotDone(id, {f"rank_{rank}.pt": 4096}, {"world_size": 2, "rank": rank})


def save(link: SaverClient, step: int) -> None:
    record = begin(link, step)
    slots.commit(Path(link.slot().slot), link.place.rank, record)
    link.committed(record.id, TO_MEMORY)


def test_a_failed_first_rank_waits_for_the_saves_of_others_at_its_exit(tmp_path: Path, monkeypatch):
    """Not for one that waits for it: until its process has ended, nobody knows that it failed. But for its part."""
    fork = multiprocessing.get_context("fork")
    has_begun, go_on, is_over = fork.Event(), fork.Event(), fork.Event()

    def second() -> None:
        link = join(tmp_path / "checkpoints", 1)
        save(link, 1)
        begin(link, 2)
        has_begun.set()
        go_on.wait(60)
        time.sleep(0.2)  # longer than an end that does not wait
        save(link, 2)
        is_over.wait(60)

    async def noted(saver: Saver, let_finish: Any = Saver._let_finish, **options: bool) -> None:
        go_on.set()
        await let_finish(saver, **options)

    monkeypatch.setattr(server, "WRITERS_TIMEOUT", 3600)
    monkeypatch.setattr(in_process_saver, "_failed", False)
    monkeypatch.setattr(Saver, "_let_finish", noted)
    process = fork.Process(target=second)
    process.start()
    first = join(tmp_path / "checkpoints", 0)
    save(first, 1)
    assert has_begun.wait(60)
    save(first, 2)
    first.close()
    in_process_saver.leave_own_saver(failed=True)
    in_process_saver.stop_own_saver()
    is_over.set()
    process.join(60)
    assert process.exitcode == 0 and on_storage(tmp_path / "checkpoints") == [2]
