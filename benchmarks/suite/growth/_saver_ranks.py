"""Ranks of one saver: processes that take part in saves as a DDP rank does, and copy nothing.

Each asks for a slot, writes its done record, reports it. All begin a save at once, and wait in the saver's thread.
"""

import os
import secrets
import signal
import time
import traceback
from pathlib import Path

from fastckpt._core.client.connection import SaverClient
from fastckpt._core.client.save_results import TO_MEMORY
from fastckpt._core.client.saver_options import saver_options
from fastckpt._core.config import RankInfo, Settings
from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc.messages import Granted
from fastckpt._core.memory import slots
from fastckpt._core.saver.server import Saver

SAVES = 30
IMAGE = 4096
"""Bytes of each rank's image."""


class Rank:
    """The parent's end of one rank: a forked process that saves when it is told to."""

    def __init__(self, rank: int, world: int, folder: Path, address: str) -> None:
        theirs, self._go = os.pipe()
        self._done, ours = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                os.close(self._go)
                write(rank, world, folder, address, theirs, ours)
                code = 0
            except BaseException:  # noqa: BLE001  # the parent says that it has ended
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(theirs)
        os.close(ours)

    def go(self) -> None:
        """Have it make its part of the next save."""
        os.write(self._go, b"s")

    def wait(self) -> None:
        """Return when it has; raises RuntimeError if it has died."""
        if os.read(self._done, 1) != b"s":
            raise RuntimeError(f"rank of process {self._pid} has ended; see what it printed")

    def end(self) -> None:
        """Have it take leave."""
        os.write(self._go, b"e")  # its end of the pipe would not do: ranks that were forked later have that, too
        os.close(self._go)
        os.waitpid(self._pid, 0)
        os.close(self._done)


def write(rank: int, world: int, folder: Path, address: str, go: int, done: int) -> None:
    """Be one rank: a save for each byte that comes, until no more can come."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.read(go, 1) != b"s":
        return
    place = RankInfo(rank=rank, local_rank=rank, world_size=world, local_world_size=world, agent=address)
    link = SaverClient(saver_options(str(folder), None, "never"), place, address)
    files = {f"rank_{rank}.pt": IMAGE}
    details = {"world_size": world, "rank": rank, "num_threads": 1, "path": "", "parent": None}
    slots_seen: set[str] = set()
    os.write(done, b"s")
    for step in range(1, 1 << 30):
        if os.read(go, 1) != b"s":
            break
        save = SaveId(link.history, step)
        link.begin(save, {})
        answer = link.slot()
        if isinstance(answer, Granted) and answer.slot not in slots_seen:
            slots_seen.add(answer.slot)  # as a rank does that has not mapped its image yet
            link.begin(save, files)
            answer = link.slot()
        if not isinstance(answer, Granted):
            raise RuntimeError(f"step {step}: {answer}")
        slots.commit(Path(answer.slot), rank, slots.SlotDone(save, files, details))
        link.committed(save, TO_MEMORY)
        os.write(done, b"s")
    link.close()


def together(ranks: list[Rank]) -> None:
    """One save of all ranks."""
    for rank in ranks:
        rank.go()
    for rank in ranks:
        rank.wait()


def thread_seconds(world: int, folder: Path) -> list[float]:
    """Seconds of the saver's thread for each save after the first, divided by the number of ranks."""
    address = f"@fastckpt-scale-{secrets.token_hex(8)}"
    ranks = [Rank(number, world, folder, address) for number in range(world)]  # forked while no thread runs
    saver = Saver(Settings(flush=False, event_log=False), address)
    saver.start()
    clock = time.pthread_getcpuclockid(saver._thread.ident or 0)

    def save(step: int) -> float:
        start, end = time.clock_gettime(clock), time.perf_counter() + 60
        together(ranks)
        while saver.report()[0].saves != step:
            if time.perf_counter() > end:
                raise TimeoutError(f"save {step} is not whole")
            time.sleep(0.001)
        return (time.clock_gettime(clock) - start) / world

    try:
        together(ranks)  # all have said hello
        return [save(step) for step in range(1, SAVES + 2)][1:]
    finally:
        for rank in ranks:
            rank.end()
        saver.close()
