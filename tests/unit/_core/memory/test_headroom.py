"""The tightest limit on shared memory is found, whatever kind it is."""

from collections import namedtuple
from pathlib import Path

import pytest

from fastckpt._core.memory import headroom as module
from fastckpt._core.memory.headroom import headroom, killed_for_memory
from fastckpt._core.policy.memory_reserve import RESERVE

MIB = 1 << 20
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


def test_the_free_space_of_the_tmpfs_or_the_available_memory_of_the_host_limits_memory(
    small_tmpfs, member, monkeypatch
):
    member("0::/")
    shm = small_tmpfs(200)
    assert headroom(shm).limit == str(shm)
    assert headroom(shm).free == less_reserve(200 * MIB, 200 * MIB)
    assert str(headroom(shm)) == f"{shm} has 190.0 MiB free of 200.0 MiB"
    for available, free in ((100 * MIB, 36 * MIB), (1, 0)):
        monkeypatch.setattr(module.psutil, "virtual_memory", lambda: Memory(available, 4096 * MIB))  # noqa: B023
        found = headroom(Path("/dev/shm"))
        assert (found.free, found.limit) == (free, "the host's memory")


def version_2(maximum: object, current: int) -> dict[str, object]:
    return {"memory__max": maximum, "memory__current": current}


def version_1(limit: int, usage: int, **more: object) -> dict[str, object]:
    return {"memory__limit_in_bytes": limit, "memory__usage_in_bytes": usage, **more}


V1, CACHE = "4:cpu,memory:/docker/abc", f"cache 1\ntotal_inactive_file {10 * MIB}\ntotal_active_file 0"
STATS = {"anon": 10, "file": 220 * MIB, "shmem": 120 * MIB, "inactive_file": 70 * MIB, "active_file": 30 * MIB}
STAT = "\n".join(f"{name} {value}" for name, value in STATS.items())
POD = version_2(300 * MIB, 100 * MIB)
GROUPS = {
    "of an ancestor": ("0::/pod/c", {"pod": POD, "pod/c": version_2("max", 50 * MIB)}, (200, 300), "pod"),
    "the tightest": ("0::/pod/c", {"pod": POD, "pod/c": version_2(250 * MIB, 90 * MIB)}, (160, 250), "pod/c"),
    "page cache of files can be taken, that of a tmpfs cannot": (
        "0::/c",
        {"c": version_2(300 * MIB, 250 * MIB) | {"memory__stat": STAT}},
        (150, 300),
        "c",
    ),
    "a namespace shows the own group as root": ("0::/", {".": version_2(200 * MIB, 0)}, (200, 200), ""),
    "of an ancestor, in version 1": (
        V1,
        {
            "memory/docker/abc": version_1(2**63 - 4096, MIB),
            "memory/docker": version_1(300 * MIB, 200 * MIB, memory__stat=CACHE),
        },
        (110, 300),
        "memory/docker",
    ),
    "other controllers": ("4:cpu:/docker\n5:name=systemd:/docker", {"memory/docker": version_1(MIB, 0)}, None, ""),
}


@pytest.mark.parametrize(("line", "groups", "limit", "of"), GROUPS.values(), ids=GROUPS)
def test_the_limit_of_a_group_limits_memory(member, line, groups, limit, of):
    root = member(line)
    for name, values in groups.items():
        group(root / name, **values)
    found = headroom(Path("/dev/shm"))
    if limit is None:
        assert "cgroup" not in found.limit
    else:
        free, total = limit
        assert found.free == less_reserve(free * MIB, total * MIB)
        assert found.limit == f"the memory limit of cgroup {root / of}"


def test_the_innermost_group_that_counts_killed_processes_is_asked_or_the_host(member, monkeypatch, tmp_path):
    root = member("4:memory:/pod/container\n0::/")
    group(root / "memory/pod", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 7")
    assert killed_for_memory() == 7
    group(root / "memory/pod/container", memory__oom_control="oom_kill_disable 0\noom_kill 2")
    assert killed_for_memory() == 2
    member("0::/container")
    group(root / "container", memory__events="low 0\nhigh 5\nmax 9\noom 4\noom_kill 3\noom_group_kill 0")
    assert killed_for_memory() == 3
    member("0::/")
    (tmp_path / "vmstat").write_text("nr_free_pages 12\noom_kill 69\n")
    monkeypatch.setattr(module, "VMSTAT", tmp_path / "vmstat")
    assert killed_for_memory() == 69
    monkeypatch.setattr(module, "VMSTAT", tmp_path / "none")
    assert killed_for_memory() == 0
