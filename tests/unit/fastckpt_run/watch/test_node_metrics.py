"""Values of the host, of its file systems and of its GPUs, and what becomes of those that do not answer."""

import os
import sys
import threading

from fastckpt_run.watch.gpu_metrics import GpuMetrics
from fastckpt_run.watch.metric_values import MetricValues
from fastckpt_run.watch.node_metrics import Probe, file_systems
from tests.support.waits import until


def by_key(values: MetricValues) -> dict[tuple[str, ...], float]:
    return {(metric.name.removeprefix("fastckpt_"), *labels): value for metric, labels, value in values}


def test_file_systems_have_the_arenas_bytes_and_the_space_of_each_directory(tmp_path):
    arena = tmp_path / "arena"
    (arena / "slot").mkdir(parents=True)
    (arena / "slot" / "image").write_bytes(bytes(1 << 20))
    (arena / "slot" / "link").symlink_to("/")
    directories = {str(tmp_path): arena, "s3://bucket/run": tmp_path / "gone", str(tmp_path / "gone"): arena}
    found = by_key(file_systems(tmp_path, lambda: directories))
    assert found["arena_bytes",] == 2 * 512 * (arena / "slot" / "image").stat().st_blocks
    space = os.statvfs(tmp_path)
    whole = found["node_tmpfs_bytes", "used"] + found["node_tmpfs_bytes", "free"]
    assert 0 < whole <= space.f_blocks * space.f_frsize
    assert {key[1] for key in found if key[0] == "node_disk_bytes"} == {str(tmp_path)}
    assert found["node_headroom_bytes",] >= 0


def test_a_probe_that_hangs_is_waited_for_by_nobody_and_its_values_vanish():
    answers, hangs, errors = threading.Semaphore(1), threading.Event(), [OSError("gone")]

    def look() -> MetricValues:
        if errors:
            raise errors.pop()  # it is asked again
        if not answers.acquire(blocking=False):
            hangs.wait(60)
        found = MetricValues()
        found.add("arena_bytes", 1)
        return found

    probe = Probe("test-probe", look, interval=0.05)
    probe.begin()
    until(lambda: by_key(probe.newest()))
    until(lambda: not by_key(probe.newest()))
    assert probe._thread.is_alive()
    probe.close()
    hangs.set()
    probe._thread.join(30)
    assert not probe._thread.is_alive()


def test_gpus_have_values_if_there_are_some_and_a_reason_if_not(monkeypatch):
    gpus = GpuMetrics()
    found = by_key(gpus.collect())
    if gpus.why_none:
        assert found == {} and ("driver" in gpus.why_none or "not installed" in gpus.why_none)
    else:
        assert all(key[0].startswith("gpu_") for key in found) and ("gpu_memory_bytes", "0", "used") in found
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed: an import fails
    gpus = GpuMetrics()
    assert by_key(gpus.collect()) == {} and "pip install 'nvidia-ml-py>=12.535'" in gpus.why_none
