"""Measures a save in the saver of a node, by its number of ranks: time of its thread, in which all ranks wait.

    python benchmarks/saver_scale.py [--ranks 2 8 32 64] [--saves 30] [--profile]

Each rank is a process that takes part in saves as a DDP rank does, and copies nothing: it asks for a slot, writes its
done record, reports it. All ranks begin a save at once. The first save, in which memory is reserved, is printed apart
from later ones, and so is every tenth, which is persisted.
"""

import argparse
import cProfile
import os
import pstats
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from fastckpt._core.client.connection import SaverClient
from fastckpt._core.client.saver_options import saver_options
from fastckpt._core.config import RankInfo, Settings
from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc.messages import Granted
from fastckpt._core.memory import slots
from fastckpt._core.saver.server import Saver

IMAGE = 4096
"""Bytes of each rank's image."""
EACH = 10
"""Saves of which one is persisted."""


class Seconds(NamedTuple):
    """Duration of a save: of the saver's thread alone, of all its threads and the benchmark's, and by the clock."""

    thread: float
    process: float
    wall: float


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
        link.committed(save, persist=step % EACH == 0)
        os.write(done, b"s")
    link.close()


def together(ranks: list[Rank]) -> None:
    """One save of all ranks."""
    for rank in ranks:
        rank.go()
    for rank in ranks:
        rank.wait()


def measure(world: int, saves: int, folder: Path, profile: cProfile.Profile | None) -> tuple[Seconds, list[Seconds]]:
    """Return the duration of the first save, and of each later one."""
    address = f"@fastckpt-scale-{secrets.token_hex(8)}"
    ranks = [Rank(number, world, folder, address) for number in range(world)]  # forked while no thread runs
    saver = Saver(Settings(flush=False, event_log=False), address)
    saver.start()
    if profile is not None:
        saver._loop.call_soon_threadsafe(profile.enable)
    clock = time.pthread_getcpuclockid(saver._thread.ident or 0)

    def save(step: int) -> Seconds:
        start = time.clock_gettime(clock), time.process_time(), time.perf_counter()
        together(ranks)
        (tally,) = saver.report()
        while (tally.saves, tally.persisted) != (step, step // EACH):
            if time.perf_counter() > start[2] + 60:
                raise TimeoutError(f"{tally.saves} of {step} saves are whole, {tally.persisted} persisted")
            time.sleep(0.001)
        end = time.clock_gettime(clock), time.process_time(), time.perf_counter()
        return Seconds(*(after - before for before, after in zip(start, end, strict=True)))

    try:
        together(ranks)  # all have said hello
        first, later = save(1), [save(step) for step in range(2, saves + 2)]
        if profile is not None:
            saver._loop.call_soon_threadsafe(profile.disable)
        return first, later
    finally:
        for rank in ranks:
            rank.end()
        saver.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--saves", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="print where the saver's thread spends its time")
    asked = parser.parse_args()
    print("ranks | saver's thread per save, ms | per rank, ms (least) | with a persist | first save | by the clock")
    for world in asked.ranks:
        folder, profile = Path(tempfile.mkdtemp()), cProfile.Profile(time.thread_time) if asked.profile else None
        try:
            first, later = measure(world, asked.saves, folder, profile)
        finally:
            shutil.rmtree(folder)
        plain = [each for step, each in enumerate(later, start=2) if step % EACH]
        persisted = [each.thread for step, each in enumerate(later, start=2) if not step % EACH]
        thread = statistics.median(each.thread for each in plain) * 1e3
        least = min(each.thread for each in plain) * 1e3
        print(
            f"{world:5d} | {thread:7.2f} | {thread / world:6.3f} ({least / world:6.3f}) | "
            f"{statistics.median(persisted) * 1e3 if persisted else float('nan'):7.2f} | {first.thread * 1e3:7.2f} | "
            f"{statistics.median(each.wall for each in plain) * 1e3:7.2f}",
            flush=True,
        )
        if profile is not None:
            pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
