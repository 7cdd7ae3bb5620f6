"""The augmentation of images on all processors, as the loader of a vision job does it beside the training.

    python benchmarks/augmentation.py [--seconds 3]

Each process crops, turns, resizes, colours and normalizes random images of its own.
"""

import argparse
import ctypes
import multiprocessing
import os
import threading
import time
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event
from types import TracebackType
from typing import Self

import torch
from torch.nn import functional

SIDE, CROP = 256, 224
MEAN, SPREAD = (torch.tensor(each).view(3, 1, 1) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
LOOKS = 0.05
"""Seconds between two looks at the counts."""


def augmented(image: torch.Tensor) -> torch.Tensor:
    """An image of floats, made of one of bytes."""
    size = int(torch.randint(96, SIDE + 1, ()))
    top, left = (int(torch.randint(0, SIDE - size + 1, ())) for _ in range(2))
    part = image[:, top : top + size, left : left + size].float().div_(255)
    part = functional.interpolate(part[None], (CROP, CROP), mode="bilinear", antialias=True)[0]
    if torch.rand(()) < 0.5:
        part = part.flip(-1)
    light, contrast = (0.6 + 0.8 * torch.rand(2)).tolist()
    part = (part - part.mean()) * contrast + part.mean() * light
    return part.clamp_(0, 1).sub_(MEAN).div_(SPREAD)


def work(number: int, counts: "SynchronizedArray[int]", stop: Event) -> None:
    """Augment until told to stop, or until the parent is gone."""
    torch.set_num_threads(1)
    torch.manual_seed(number)
    parent = os.getppid()
    image = torch.randint(0, 256, (3, SIDE, SIDE), dtype=torch.uint8)
    while not stop.is_set() and os.getppid() == parent:
        augmented(image)
        counts[number] += 1


class Augmentation:
    """Processes that augment images, as many as there are processors, in a `with` block."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        number = len(os.sched_getaffinity(0))
        self._counts = context.Array(ctypes.c_long, number, lock=True)
        self._stop = context.Event()
        self._processes = [context.Process(target=work, args=(n, self._counts, self._stop)) for n in range(number)]
        self._looks: list[tuple[float, int]] = []
        self._looker = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        while not all(self._counts):
            if not all(process.is_alive() for process in self._processes):
                self.__exit__(None, None, None)
                raise RuntimeError("a process that augments images has ended")
            time.sleep(LOOKS)
        self._looker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for process in self._processes:
            process.join()
        if self._looker.is_alive():
            self._looker.join()

    def rate(self, began: float, ended: float) -> float:
        """Images per second between two times of day."""
        looks = [look for look in self._looks if began - LOOKS <= look[0] <= ended + LOOKS]
        if len(looks) < 2:
            raise RuntimeError(f"{ended - began:.2f} s are too short to count images; measure more steps")
        return (looks[-1][1] - looks[0][1]) / (looks[-1][0] - looks[0][0])

    def _look(self) -> None:
        while not self._stop.wait(LOOKS):
            self._looks.append((time.time(), sum(self._counts)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    seconds = parser.parse_args().seconds
    with Augmentation() as job:
        began = time.time()
        time.sleep(seconds)
        print(f"{job.rate(began, time.time()):.0f} images per second")


if __name__ == "__main__":
    main()
