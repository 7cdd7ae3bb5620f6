"""Disks that are full or fail, processes that are killed: training goes on, nothing is left."""

import gc
import logging
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from fastckpt._core import metrics
from fastckpt.errors import OffloadError
from fastckpt.offload import ActivationOffload
from tests.e2e.offload.losses import leaf, one_step, settled, some_loss
from tests.faults.test_disk import leave, new_device, unmount
from tests.support import launchers

MIB = 1 << 20


@pytest.fixture
def device(tmp_path):
    """Unmounted, once the threads that a test leaves have ended and closed the file there."""
    made, end = new_device(tmp_path), time.monotonic() + 90
    yield made
    while True:
        gc.collect()
        try:
            return unmount(made.path)
        except subprocess.CalledProcessError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_step_on_a_full_disk_goes_on_in_memory_and_one_warning_says_so(device, caplog):
    ballast = leave(device.path, 9 * MIB)
    offload = ActivationOffload(device.path, budget="4MiB")
    events: list[dict] = []
    metrics.listen(events.append)
    try:
        assert all(one_step(offload) for _ in range(3))
    finally:
        metrics.unlisten(events.append)
    (warning,) = warnings_of(caplog)
    assert str(device.path) in warning and "No space left on device" in warning
    report = offload.report()
    assert "No space left" in report.failure and 0 < report.written <= 9 * MIB and report.read == report.written
    ended = [event for event in events if event["event"] == "offload_ended"]
    assert [event["error"] for event in ended] == ["No space left on device"]
    assert str(report).endswith(report.failure)
    assert sorted(os.listdir(device.path)) == sorted(["lost+found", ballast.name])
    del offload


def test_a_disk_that_fails_while_it_is_written_to_ends_the_offloading_and_not_the_step(device, caplog):
    offload = ActivationOffload(device.path, budget="4MiB")
    assert one_step(offload)
    mine, theirs, seen = leaf(), leaf(), 0

    def fail(phase, fields):
        nonlocal seen
        seen += phase == "offload.write"
        if phase == "offload.write" and seen == 1:
            device.pull_out()

    metrics.observe(fail)
    try:
        with offload:
            loss = some_loss(mine)
        settled(offload)
    finally:
        metrics.unobserve(fail)
    loss.backward()
    some_loss(theirs).backward()
    assert torch.equal(mine.grad, theirs.grad) and one_step(offload)
    (warning,) = warnings_of(caplog)
    assert "Input/output error" in warning
    del offload, loss


def test_what_a_failed_disk_holds_is_an_error_that_says_what_to_do(device):
    offload = ActivationOffload(device.path, budget="4MiB")
    mine = leaf()
    with offload:
        loss = some_loss(mine)
    settled(offload)
    device.pull_out()
    with pytest.raises(OffloadError, match=r"1\.0 MiB of activations .*Input/output error.*last checkpoint"):
        loss.backward()
    assert mine.grad is None
    del offload, loss


def run(folder: Path, program: str, *arguments: object) -> tuple[int, str]:
    """Run a program in a fork; its exit code, and what it prints."""
    script, output = folder / "program.py", folder / "output"
    script.write_text(program)
    with output.open("wb") as file:
        code = launchers.start([str(script), *map(str, arguments)], os.environ, file.fileno()).wait(120)
    return code, output.read_text()


KILLED = """
import os, signal, sys
from fastckpt._core import metrics
from fastckpt.offload import ActivationOffload
from tests.e2e.offload.losses import one_step
phase, offload = sys.argv[2], ActivationOffload(sys.argv[1], budget="4MiB")
metrics.observe(lambda name, fields: name == phase and os.kill(os.getpid(), signal.SIGKILL))
while True:
    one_step(offload)
"""


@pytest.mark.parametrize("phase", ["offload.write", "offload.read"])
def test_a_process_killed_in_a_phase_leaves_no_file_and_no_space_in_use(device, tmp_path, phase, forked_launchers):
    free = os.statvfs(device.path).f_bfree
    code, text = run(tmp_path, KILLED, device.path, phase)
    assert code == -signal.SIGKILL, text
    assert os.listdir(device.path) == ["lost+found"]
    end = time.monotonic() + 30  # the kernel frees blocks of a nameless file when the last descriptor is closed
    while os.statvfs(device.path).f_bfree < free - 64 and time.monotonic() < end:
        time.sleep(0.01)
    assert os.statvfs(device.path).f_bfree >= free - 64


PEAK = """
import sys, torch
from fastckpt.offload import ActivationOffload
how = sys.argv[2]
def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) << 10
def loss(value):
    # sizes differ from layer to layer, so that freed blocks of a heap are split and seldom fit
    for width in widths[1:]:
        value = (value @ weights[width]).tanh()
    return value.sum()
torch.set_num_threads(1)
widths = [500, *range(500, 820, 20)]
weights = {b: torch.full((a, b), 0.01).requires_grad_() for a, b in zip(widths, widths[1:])}
inputs = torch.ones(1024, 500)
offload = ActivationOffload(sys.argv[1], budget="4MiB", return_memory=how == "back")
for turn in range(2):
    if turn:
        before = status("VmRSS")
        open("/proc/self/clear_refs", "w").write("5")
    if how == "none":
        value = loss(inputs)
    else:
        with offload:
            value = loss(inputs)
    value.backward()
print(status("VmHWM") - before)
"""


def test_freed_activations_go_back_to_the_system(tmp_path, forked_launchers):
    """Measured as the most memory of a process above that between steps."""
    peaks = {}
    for how in ("none", "back", "kept"):
        code, text = run(tmp_path, PEAK, tmp_path, how)
        assert code == 0, text
        peaks[how] = int(text) // MIB
    assert peaks["back"] <= 0.35 * peaks["none"], peaks
    assert peaks["back"] <= 0.8 * peaks["kept"], peaks
