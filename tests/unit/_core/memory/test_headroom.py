"""The tightest limit on shared memory is found, whatever kind it is."""

import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from fastckpt._core.memory import headroom as module
from fastckpt._core.memory.headroom import headroom, killed_for_memory
from fastckpt._core.policy.memory_reserve import RESERVE

MIB = 1 << 20
ROOT = Path(__file__).parents[4]
Memory = namedtuple("Memory", "available total")


def less_reserve(free: int, total: int) -> int:
    """What is left when others got their share: 64 MiB, or of a small limit a twentieth."""
    return free - min(RESERVE, total // 20)


def group(directory: Path, **values: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (directory / name.replace("__", ".")).write_text(f"{value}\n")


@pytest.fixture
def member(tmp_path: Path, monkeypatch):
    """Makes this process a member of cgroups of a made-up tree."""
    monkeypatch.setattr(module, "CGROUPS", tmp_path / "cgroup")
    read_text = Path.read_text

    def belongs(line: str) -> Path:
        def fake(self: Path, *args: object, **kwargs: object) -> str:
            return line + "\n" if str(self) == "/proc/self/cgroup" else read_text(self, *args, **kwargs)

        monkeypatch.setattr(Path, "read_text", fake)
        return tmp_path / "cgroup"

    return belongs


def test_the_free_space_of_the_tmpfs_limits_memory(small_tmpfs, member):
    member("0::/")
    shm = small_tmpfs(200)
    assert headroom(shm).limit == str(shm)
    assert headroom(shm).free == less_reserve(200 * MIB, 200 * MIB)
    assert str(headroom(shm)) == f"{shm} has 190.0 MiB free of 200.0 MiB"


def test_the_available_memory_of_the_host_limits_memory(member, monkeypatch):
    member("0::/")
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: Memory(100 * MIB, 4096 * MIB))
    found = headroom(Path("/dev/shm"))
    assert (found.free, found.limit) == (36 * MIB, "the host's memory")


def test_headroom_is_never_negative(member, monkeypatch):
    member("0::/")
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: Memory(1, 4096 * MIB))
    assert headroom(Path("/dev/shm")).free == 0


class TestCgroupVersion2:
    def test_the_limit_of_an_ancestor_group_limits_memory(self, member):
        root = member("0::/pod/container")
        group(root / "pod", memory__max=300 * MIB, memory__current=100 * MIB)
        group(root / "pod" / "container", memory__max="max", memory__current=50 * MIB)
        found = headroom(Path("/dev/shm"))
        assert found.free == less_reserve(200 * MIB, 300 * MIB)
        assert found.limit == f"the memory limit of cgroup {root / 'pod'}"

    def test_the_tightest_group_limit_counts(self, member):
        root = member("0::/pod/container")
        group(root / "pod", memory__max=300 * MIB, memory__current=100 * MIB)
        group(root / "pod" / "container", memory__max=250 * MIB, memory__current=90 * MIB)
        assert headroom(Path("/dev/shm")).free == less_reserve(160 * MIB, 250 * MIB)

    def test_page_cache_of_files_can_be_taken_that_of_a_tmpfs_cannot(self, member):
        root = member("0::/container")
        group(root / "container", memory__max=300 * MIB, memory__current=250 * MIB)
        statistics = {
            "anon": 10,
            "file": 220 * MIB,
            "shmem": 120 * MIB,
            "inactive_file": 70 * MIB,
            "active_file": 30 * MIB,
        }
        text = "\n".join(f"{name} {value}" for name, value in statistics.items())
        (root / "container" / "memory.stat").write_text(text)
        assert headroom(Path("/dev/shm")).free == less_reserve(150 * MIB, 300 * MIB)

    def test_a_namespace_shows_the_own_group_as_root(self, member):
        root = member("0::/")
        group(root, memory__max=200 * MIB, memory__current=0)
        assert headroom(Path("/dev/shm")).free == less_reserve(200 * MIB, 200 * MIB)

    def test_a_group_that_cannot_be_seen_is_no_limit(self, member):
        member("0::/../../elsewhere")
        assert "cgroup" not in headroom(Path("/dev/shm")).limit


class TestCgroupVersion1:
    def test_the_limit_of_an_ancestor_group_limits_memory(self, member):
        root = member("4:cpu,memory:/docker/abc") / "memory"
        group(root / "docker" / "abc", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=MIB)
        group(root / "docker", memory__limit_in_bytes=300 * MIB, memory__usage_in_bytes=200 * MIB)
        (root / "docker" / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {10 * MIB}\ntotal_active_file 0\n")
        found = headroom(Path("/dev/shm"))
        assert found.free == less_reserve(110 * MIB, 300 * MIB)
        assert found.limit.endswith("cgroup/memory/docker")

    def test_limits_of_other_controllers_do_not_count(self, member):
        root = member("4:cpu:/docker\n5:name=systemd:/docker")
        group(root / "memory" / "docker", memory__limit_in_bytes=MIB, memory__usage_in_bytes=0)
        assert "cgroup" not in headroom(Path("/dev/shm")).limit


class TestProcessesKilledForMemory:
    def test_the_innermost_group_that_counts_them_is_asked(self, member):
        root = member("4:memory:/pod/container\n0::/")
        group(root / "memory" / "pod", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 7")
        assert killed_for_memory() == 7
        group(root / "memory" / "pod" / "container", memory__oom_control="oom_kill_disable 0\noom_kill 2")
        assert killed_for_memory() == 2

    def test_version_2_counts_them_among_its_events(self, member):
        root = member("0::/container")
        group(root / "container", memory__events="low 0\nhigh 5\nmax 9\noom 4\noom_kill 3\noom_group_kill 0")
        assert killed_for_memory() == 3

    def test_without_a_group_the_host_counts(self, member, monkeypatch, tmp_path):
        member("0::/")
        (tmp_path / "vmstat").write_text("nr_free_pages 12\noom_kill 69\n")
        monkeypatch.setattr(module, "VMSTAT", tmp_path / "vmstat")
        assert killed_for_memory() == 69
        monkeypatch.setattr(module, "VMSTAT", tmp_path / "none")
        assert killed_for_memory() == 0


HUNGRY = """
import subprocess, sys
from fastckpt._core.memory.headroom import killed_for_memory
before = killed_for_memory()
eats = subprocess.run([sys.executable, "-c", "x = bytearray(400 << 20)"])
print(eats.returncode, killed_for_memory() - before)
"""


SAVER = """
import sys, torch
from pathlib import Path
from fastckpt.ddp import DdpCheckpointer
from fastckpt.errors import ArenaTooSmall
with DdpCheckpointer(sys.argv[1]) as checkpointer:
    for size in (20, 150):
        state = {"weights": torch.zeros(size << 18)}
        for step in range(3):
            try:
                result = checkpointer.save_checkpoint(size + step, state)
                print(result.reason or f"{size} saved", flush=True)
            except ArenaTooSmall as error:
                print(error, flush=True)
"""


@pytest.fixture
def limited():
    """Makes a cgroup whose members may take so many MiB."""
    path = Path(f"/sys/fs/cgroup/memory/fastckpt-test-{os.getpid()}")
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(600 * MIB))
    except OSError as error:
        if path.is_dir():
            path.rmdir()
        pytest.skip(f"cannot make a cgroup (version 1) with a memory limit: {error}")
    yield path
    path.rmdir()


def run_in(group: Path, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    join = 'echo $$ > "$0"/cgroup.procs && exec "$@"'
    command = ["sh", "-c", join, str(group), sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)


def test_a_process_that_the_kernel_kills_for_memory_is_counted(limited: Path):
    (limited / "memory.limit_in_bytes").write_text(str(200 * MIB))
    done = run_in(limited, HUNGRY)
    assert done.stdout == "-9 1\n", (done.stdout, done.stderr)


def test_memory_beyond_a_real_group_limit_is_an_error_and_no_kill(limited: Path, tmp_path: Path):
    """A process limited to 600 MiB saves 20 MiB, and is told that twice 150 MiB do not fit."""
    done = run_in(limited, SAVER, tmp_path / "checkpoints")
    assert done.returncode == 0, (done.returncode, done.stderr, done.stdout)
    lines = done.stdout.splitlines()
    assert lines[:3] == ["20 saved"] * 3
    assert all("150.1 MiB" in line and f"memory limit of cgroup {limited}" in line for line in lines[3:]), lines
    assert len(lines) == 6
