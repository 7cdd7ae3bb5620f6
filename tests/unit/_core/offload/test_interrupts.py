"""Ctrl-C while activations are offloaded: heard each time, and nothing stays counted."""

import gc
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

from fastckpt.offload import ActivationOffload
from tests.support.forked_programs import run

SIGNALS = 10


def interrupted(scratch: str) -> None:
    """Trains, and is interrupted at any moment, again and again."""
    torch.set_num_threads(1)
    random.seed(1)
    lost: list[str] = []
    sys.unraisablehook = lambda lost_error: lost.append(str(lost_error.object))
    model, inputs = (
        nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)]),
        torch.ones(512, 512),
    )
    offload, heard, loss = ActivationOffload(scratch, budget="4MiB"), 0, None
    for _ in range(SIGNALS):
        timer = threading.Timer(random.uniform(0.02, 0.15), os.kill, (os.getpid(), signal.SIGINT))
        end = time.monotonic() + 20
        try:
            timer.start()
            while time.monotonic() < end:
                with offload:
                    loss = model(inputs).square().mean()
                loss.backward()
        except KeyboardInterrupt:
            heard += 1
        timer.join()
    del loss
    gc.collect()
    store = offload._offloader._store
    end = time.monotonic() + 20
    while (left := (store.resident, store.in_flight, store.file.used)) != (0, 0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    assert (heard, lost, left) == (SIGNALS, [], (0, 0, 0))


def test_each_interrupt_of_an_offloaded_step_is_heard_and_leaves_the_budget_whole(
    tmp_path: Path, forked_launchers: None
):
    program = f"from {__name__} import interrupted; interrupted({str(tmp_path)!r})"
    [(code, said)] = run(tmp_path, program, [()])
    assert code == 0, said
