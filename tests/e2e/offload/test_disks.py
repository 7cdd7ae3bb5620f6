"""Disks that are full or fail, directories in memory, processes that are killed: training goes on, nothing is left."""

import contextlib
import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fastckpt._core import metrics
from fastckpt.errors import OffloadError
from fastckpt.offload import ActivationOffload
from tests.faults.test_disk import leave, mounted, new_device, unmount

MIB = 1 << 20
ROOT = Path(__file__).parents[3]


@pytest.fixture
def device(tmp_path):
    """It ends with what offloads to it."""
    made = new_device(tmp_path)
    yield made
    ended(made.path)


def ended(path: Path) -> None:
    """Unmount, once the threads that a test leaves have ended and closed the file there."""
    end = time.monotonic() + 30
    while True:
        gc.collect()
        try:
            return unmount(path)
        except subprocess.CalledProcessError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


def some_loss(leaf: torch.Tensor, turns: int = 12) -> torch.Tensor:
    value = leaf
    for _ in range(turns):
        value = (value * 1.01).exp().tanh()
    return value.sum()


def leaf() -> torch.Tensor:
    return torch.randn(512, 512, generator=torch.Generator().manual_seed(1)).requires_grad_()


def settled(offload: ActivationOffload) -> None:
    store = offload._offloader._store
    with store._moved:
        assert store._moved.wait_for(lambda: store.in_flight == 0, 60)


def one_step(offload: ActivationOffload, turns: int = 12) -> bool:
    """Whether its gradient is bitwise that without offloading."""
    mine, theirs = leaf(), leaf()
    with offload:
        loss = some_loss(mine, turns)
    settled(offload)
    loss.backward()
    some_loss(theirs, turns).backward()
    return torch.equal(mine.grad, theirs.grad)


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@contextlib.contextmanager
def listening():
    events: list[dict] = []
    listener = events.append
    metrics.listen(listener)
    try:
        yield events
    finally:
        metrics.unlisten(listener)


def test_a_step_on_a_full_disk_goes_on_in_memory_and_one_warning_says_so(device, caplog):
    ballast = leave(device.path, 9 * MIB)
    offload = ActivationOffload(device.path, budget="4MiB")
    with listening() as events:
        for _ in range(3):
            assert one_step(offload)
    (warning,) = warnings_of(caplog)
    assert str(device.path) in warning and "No space left on device" in warning
    assert "in the file there" in warning and "Free space there" in warning
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


def test_a_write_that_is_refused_once_ends_the_offloading(tmp_path, monkeypatch, caplog):
    offload = ActivationOffload(tmp_path, budget="4MiB")
    pwrite, refused = os.pwrite, []

    def refuse(descriptor, data, offset):
        if len(refused) == 0 and offset > 3 * MIB:
            refused.append(offset)
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    assert one_step(offload) and one_step(offload)
    assert refused and len(warnings_of(caplog)) == 1 and "quota" in offload.report().failure.lower()


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "overlay"])
def test_directories_in_memory_or_in_layers_work_as_any(tmp_path, kind):
    """ramfs has no O_DIRECT; an overlay passes it on to its upper layer, if that has it."""
    options = []
    if kind == "overlay":
        for name in ("lower", "upper", "work"):
            (tmp_path / name).mkdir()
        options = ["-o", ",".join(f"{name}dir={tmp_path / name}" for name in ("lower", "upper", "work"))]
    path = mounted(tmp_path / "place", "-t", kind, *options, kind)
    try:
        offload = ActivationOffload(path, budget="4MiB")
        assert all(one_step(offload) for _ in range(3))
        report = offload.report()
        assert report.written and report.read and not report.failure
        assert os.listdir(path) == []
        if kind == "ramfs":
            assert not report.direct and "through the page cache" in str(report)
        del offload
    finally:
        ended(path)


def test_a_directory_in_memory_gets_a_warning(tmp_path, caplog):
    path = mounted(tmp_path / "place", "-t", "tmpfs", "tmpfs")
    try:
        ActivationOffload(path, budget="4MiB")
    finally:
        ended(path)
    (warning,) = warnings_of(caplog)
    assert "memory" in warning and str(path) in warning


KILLED = """
import sys
from fastckpt._core import metrics
from fastckpt.offload import ActivationOffload
from tests.e2e.offload.test_disks import leaf, one_step, settled, some_loss
import os, signal
phase, offload = sys.argv[2], ActivationOffload(sys.argv[1], budget="4MiB")
metrics.observe(lambda name, fields: name == phase and os.kill(os.getpid(), signal.SIGKILL))
while True:
    one_step(offload)
"""


@pytest.mark.parametrize("phase", ["offload.forward", "offload.write", "offload.read", "offload.plan"])
def test_a_process_killed_in_a_phase_leaves_no_file_and_no_space_in_use(device, phase):
    free = os.statvfs(device.path).f_bfree
    command = [sys.executable, "-c", KILLED, str(device.path), phase]
    killed = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert os.listdir(device.path) == ["lost+found"]
    end = (
        time.monotonic() + 30
    )  # the kernel frees the blocks of a file without a name when the last descriptor is closed
    while os.statvfs(device.path).f_bfree < free - 64 and time.monotonic() < end:
        time.sleep(0.05)
    assert os.statvfs(device.path).f_bfree >= free - 64


PEAK = """
import sys, torch
from fastckpt.offload import ActivationOffload
how = sys.argv[2]
def high_water():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) << 10
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) << 10
def loss(value):
    # sizes differ from layer to layer, so that freed blocks of a heap are split and seldom fit
    for width in range(500, 820, 10):
        value = (value @ weights[width]).tanh()
    return value.sum()
torch.set_num_threads(1)
widths = [500, *range(500, 820, 10)]
weights = {b: torch.full((a, b), 0.01).requires_grad_() for a, b in zip(widths, widths[1:])}
inputs = torch.ones(1024, 500)
offload = None if how == "none" else ActivationOffload(sys.argv[1], budget="8MiB", return_memory=how == "back")
for _ in range(3):
    if _ == 1:
        before = resident()
        open("/proc/self/clear_refs", "w").write("5")
    if offload:
        with offload:
            value = loss(inputs)
    else:
        value = loss(inputs)
    value.backward()
print(high_water() - before)
"""


def test_freed_activations_go_back_to_the_system(tmp_path):
    """Measured as the most memory of a process above that between steps."""
    peaks = {}
    for how in ("none", "back", "kept"):
        command = [sys.executable, "-c", PEAK, str(tmp_path), how]
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        peaks[how] = int(done.stdout) // MIB
    assert peaks["back"] <= 0.35 * peaks["none"], peaks
    assert peaks["back"] <= 0.8 * peaks["kept"], peaks
