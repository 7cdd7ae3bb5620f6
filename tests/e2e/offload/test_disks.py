"""Disks that are full or fail, processes that are killed: training goes on, nothing is left."""

import gc
import logging
import os
import signal
import subprocess
import time

import pytest
import torch

from fastckpt._core import metrics
from fastckpt._core.report.report import report as offloaded
from fastckpt.errors import OffloadError
from fastckpt.offload import ActivationOffload
from fastckpt_run.views import report_text
from tests.e2e.offload.losses import leaf, one_step, settled, some_loss
from tests.e2e.offload.test_page import assert_as_on_the_page
from tests.faults.test_disk import new_device
from tests.support.forked_programs import run
from tests.support.small_disks import leave, unmount
from tests.unit._core.report.schema import COMMON, faults
from tests.unit._core.report.stories import Story

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


def test_a_step_on_a_full_disk_goes_on_in_memory_and_a_warning_and_the_jobs_report_say_so(device, caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
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
    assert str(report).endswith(report.failure)
    assert sorted(os.listdir(device.path)) == sorted(["lost+found", ballast.name])
    story = Story().starts(1, 2, 3, 4).loads(5, 1).trains(6, 10)
    for event in events:
        assert not faults(event)
        story.at(8, event["event"], **{name: value for name, value in event.items() if name not in COMMON})
    [one] = (found := offloaded([story.log])).offloaded
    [end] = one.ends
    assert (one.rank, one.steps, end.error) == (1, 0, "No space left on device") and end.remedy.startswith("Free space")
    assert_as_on_the_page("fastckpt report run | grep ended", "\n".join(report_text.facts(found)), device.path)
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


def test_processes_killed_in_a_phase_leave_no_file_and_no_space_in_use(device, tmp_path, forked_launchers):
    free = os.statvfs(device.path).f_bfree
    # One after the other: two at a time may fill the disk, and the second one then never writes.
    ends = [end for phase in ("offload.write", "offload.read") for end in run(tmp_path, KILLED, [(device.path, phase)])]
    assert [code for code, _ in ends] == [-signal.SIGKILL] * 2, ends
    assert os.listdir(device.path) == ["lost+found"]
    end = time.monotonic() + 30  # the kernel frees blocks of a nameless file when the last descriptor is closed
    while os.statvfs(device.path).f_bfree < free - 64 and time.monotonic() < end:
        time.sleep(0.01)
    assert os.statvfs(device.path).f_bfree >= free - 64


PEAK = """
import sys, torch
from fastckpt.offload import ActivationOffload
def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) << 10
def loss(value):
    # sizes differ from layer to layer, so that freed blocks of a heap are split and seldom fit
    for width in widths[1:]:
        value = (value @ weights[width]).tanh()
    return value.sum()
torch.set_num_threads(1)
widths = [500, *range(500, 820, 20)]
weights = {b: torch.full((a, b), 0.002).requires_grad_() for a, b in zip(widths, widths[1:])}
inputs = torch.ones(1024, 500)
offload = ActivationOffload(sys.argv[1], budget="4MiB", return_memory=sys.argv[2] == "back")
for turn in range(2):
    if turn:
        before = status("VmRSS")
        open("/proc/self/clear_refs", "w").write("5")
    with offload:
        value = loss(inputs)
    value.backward()
print(status("VmHWM") - before)
"""


def test_freed_activations_go_back_to_the_system(tmp_path, forked_launchers):
    """Measured as the most memory of a process above that between steps; without, they stay in its heap."""
    ends = run(tmp_path, PEAK, [(tmp_path, how) for how in ("back", "kept")])
    assert [code for code, _ in ends] == [0, 0], ends
    back, kept = (int(text) // MIB for _, text in ends)
    assert back <= 0.5 * kept, (back, kept)
