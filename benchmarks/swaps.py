"""Weights that are swapped, and back, while a save is copied: what is committed, what is missed, what it costs.

    python benchmarks/swaps.py [--swaps 1000] [--tries 100] [--megabytes 48]

Swaps are written through ``.data``, which torch does not count, from the training thread, while the thread of the
checkpointer copies. Each time the image is compared with what was to be saved, whether it was committed or not.
"""

import argparse
import contextlib
import ctypes
import gc
import logging
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastckpt import metrics
from fastckpt._core.snapshot.mutation_check import Digests
from fastckpt._core.snapshot.sampled_bytes import SampledBytes
from fastckpt._core.transfer.host_copy import Backlog, Copy
from fastckpt.ddp import DdpCheckpointer, StorageType
from fastckpt.errors import OverlapError

WIDTH = 1024
LAYER = WIDTH * WIDTH * 4
REPEATS = 15


class Training:
    """A model of layers of 4 MiB, with AdamW, whose saves overlap; all saves are of one state, since nothing steps."""

    def __init__(self, folder: str, megabytes: int) -> None:
        count = max(1, megabytes // 3 // (LAYER >> 20))
        self.model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)])
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters)
        self.saves = DdpCheckpointer(folder, overlap=self.optimizer)
        self.overlap = self.saves._writer.overlap
        self.number = 0
        self.step()
        self.save()
        self.step()
        self.overlap.wait()
        self.wanted = {each.data_ptr(): each.clone() for each in self._tensors()}
        self.others = [torch.full_like(each, 7.0, requires_grad=False) for each in self.parameters]
        self.copies: list[Copy] = []

    def _tensors(self) -> list[torch.Tensor]:
        states = [each for state in self.optimizer.state.values() for each in state.values()]
        return [each.detach() for each in self.parameters] + states

    def step(self) -> None:
        for each in self.parameters:
            each.grad = torch.ones_like(each)
        self.optimizer.step()

    def save(self) -> None:
        self.overlap.defer([self.optimizer])  # as if it had not been turned off
        self.number += 1
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        result = self.saves.save_checkpoint(self.number, state, storage_type=StorageType.MEMORY)
        assert result.saved, result
        if result.pending and self.overlap._pending is not None:
            places = {each.data_ptr() for each in self.parameters}
            copies = self.overlap._pending[0].backlog._alive
            self.copies = [copy for copy in copies if copy[1].data_ptr() in places]  # nothing else is swapped

    def end(self) -> tuple[bool, int]:
        """Return whether the save was committed, and how many bytes of its image differ from the saved state."""
        self.overlap.wait()
        (_, outcome) = self.overlap._endings.pop()
        return not outcome.skipped, sum(map(self._torn, self.copies))

    def _torn(self, copy: Copy) -> int:
        target, storage, size = copy
        image = torch.frombuffer((ctypes.c_char * size).from_address(target), dtype=torch.uint8)
        wanted = self.wanted[storage.data_ptr()].view(-1).view(torch.uint8)
        return 0 if torch.equal(image, wanted) else int((image != wanted).sum())

    def write(self, order: list[int], sources: list[torch.Tensor]) -> None:
        for index in order:
            self.parameters[index].data.copy_(sources[index])

    def kept(self) -> list[torch.Tensor]:
        return [self.wanted[each.data_ptr()] for each in self.parameters]


def swaps(training: Training, count: int) -> None:
    """Measure swaps of all weights, begun and ended anywhere in the copy."""
    copying = statistics.median(timed(training) for _ in range(REPEATS))
    torn: list[int] = []
    committed = missed = 0
    for _ in range(count):
        order = list(range(len(training.parameters)))
        random.choice([lambda o: None, list.reverse, random.shuffle])(order)
        pause, evaluation = random.random() * copying, random.random() ** 2 * copying
        training.save()
        time.sleep(pause)
        training.write(order, training.others)
        time.sleep(evaluation)
        training.write(order, training.kept())
        is_committed, differing = training.end()
        committed += is_committed
        missed += bool(is_committed and differing)
        torn += [differing] if differing else []
    small = sum(each < 1 << 20 for each in torn)
    print(
        f"{count} swaps of all weights during a copy of {1e3 * copying:.0f} ms: images with others' bytes {len(torn)}"
    )
    print(f"  (in {small} less than 1 MiB); committed {committed}, of these torn {missed}", flush=True)


def timed(training: Training) -> float:
    began = time.monotonic()
    training.save()
    training.overlap.wait()
    return time.monotonic() - began


@contextlib.contextmanager
def during_the_copy(write: Callable[[], object], undo: Callable[[], object]) -> Iterator[threading.Event]:
    """Written before the first byte is copied, undone after the last; what is given is set then."""
    undone = threading.Event()

    def see(phase: str, fields: dict[str, Any]) -> None:
        if phase == "overlap.copy":
            write()
        elif phase == "overlap.compare":
            undo()
            undone.set()

    metrics.observe(see)
    yield undone
    metrics.unobserve(see)


def parts(training: Training, tries: int, *, digested: bool) -> None:
    """Swaps of a part of a layer, undone after the copy: how many are committed."""
    for name, size in {
        "row": WIDTH,
        "64 KiB": 1 << 14,
        "256 KiB": 1 << 16,
        "1 MiB": 1 << 18,
        "layer": LAYER // 4,
    }.items():
        missed = sum(_is_missed(training, size) for _ in range(tries))
        mode = "all digested" if digested else "sampled"
        print(f"{mode}: {name} of {size * 4 >> 10} KiB swapped {tries} times, missed {missed}", flush=True)


def _is_missed(training: Training, size: int) -> bool:
    which = random.randrange(len(training.parameters))
    start = random.randrange(LAYER // 4 // size) * size
    part = training.parameters[which].data.view(-1)[start : start + size]
    before = part.clone()
    with during_the_copy(lambda: part.fill_(7.0), lambda: part.copy_(before)) as undone:
        training.save()
        undone.wait()
        try:
            committed, differing = training.end()
        except OverlapError:
            training.overlap._endings.clear()
            return False
    assert differing > size * 3, differing
    return committed


def medians(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds that each takes; they take turns, so that what else the machine does meets all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    gc.disable()  # as saves do
    for _ in range(REPEATS):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - began)
    gc.enable()
    return {name: statistics.median(each) for name, each in seconds.items()}


def costs(training: Training, megabytes: int) -> None:
    """Measure the samples and the digests, beside the copy by one thread."""
    for size in (LAYER, 1 << 16):
        count = (megabytes << 20) // size
        tensors = [torch.randn(size // 4) for _ in range(count)]
        targets = [torch.zeros(size // 4) for _ in range(count)]
        pairs = zip(tensors, targets, strict=True)
        copies: list[Copy] = [(target.data_ptr(), each.untyped_storage(), size) for each, target in pairs]
        by_storage = {each.untyped_storage()._cdata: [each] for each in tensors}
        Backlog(copies).finish()

        def take(copies: list[Copy] = copies, by: dict[int, list[torch.Tensor]] = by_storage) -> SampledBytes:
            return SampledBytes(copies, lambda storage: by[storage._cdata])

        taken, digests = take(), Digests(copies)
        works: dict[str, Callable[[], object]] = {
            "copy by one thread": lambda c=copies: Backlog(c).finish(),
            "the same with samples compared around each piece": lambda c=copies, s=taken: Backlog(
                c, s.compare
            ).finish(),
            "samples taken, before the save returns": take,
            "samples compared with the copies": taken.differing_copy,
            "samples compared with the sources": taken.differing_source,
            "FASTCKPT_CHECK_OVERLAP=1: digests before": lambda c=copies: Digests(c),
            "FASTCKPT_CHECK_OVERLAP=1: digests after": digests.differing,
        }
        print(f"{count} tensors of {size >> 10} KiB, ms per GB, and ratio to the copy:")
        seconds = medians(works)
        for name, each in seconds.items():
            print(
                f"  {name}: {each * 1e12 / (count * size):.2f}  {each / seconds['copy by one thread']:.4f}", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=1000)
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--megabytes", type=int, default=48)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("fastckpt").setLevel(logging.ERROR)
    for checked in (False, True):
        os.environ["FASTCKPT_CHECK_OVERLAP"] = str(int(checked))
        with tempfile.TemporaryDirectory() as folder:
            training = Training(folder, options.megabytes)
            if not checked:
                costs(training, 4 * options.megabytes)
                swaps(training, options.swaps)
            parts(training, options.tries, digested=checked)
            training.saves.close()


if __name__ == "__main__":
    main()
