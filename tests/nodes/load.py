"""Load under which hosts have to be told from lost ones: processes that want cores, and control groups that get few."""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.nodes.hosts import Host

_GROUPS = Path("/sys/fs/cgroup/cpu")
_PERIOD = 100_000


def make_busy(host: Host, count: int, output: Path) -> None:
    """Start so many processes there that never rest."""
    for _ in range(count):
        host.start("-c", "while True: pass", output=output)


def obstacle_to_throttling() -> str:
    """Why no host can be throttled here; empty if one can."""
    try:
        with _group():
            return ""
    except OSError as error:
        return f"no control group for cores can be made here: {error}"


@contextlib.contextmanager
def throttled(host: Host, share: float) -> Iterator[None]:
    """Give all processes of a host, and those that they will start, this share of one core."""
    with _group() as group:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(int(share * _PERIOD)))
        for pid in _processes_of(host):
            _move(pid, group)
        yield


def periods_throttled(host: Host) -> int:
    """For how many tenths of a second the host's processes were kept from running."""
    name = next(line for line in Path(f"/proc/{host.pid}/cgroup").read_text().splitlines() if ":cpu:" in line)
    stat = (_GROUPS / name.rpartition(":")[2].lstrip("/") / "cpu.stat").read_text()
    return int(dict(line.split() for line in stat.splitlines())["nr_throttled"])


@contextlib.contextmanager
def _group() -> Iterator[Path]:
    group = _GROUPS / f"fastckpt-{uuid.uuid4()}"
    group.mkdir()
    try:
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            _move(int(pid), _GROUPS)
        _remove(group)


def _remove(group: Path) -> None:
    end = time.monotonic() + 5
    while group.exists() and time.monotonic() < end:
        with contextlib.suppress(OSError):  # busy while a process of it ends
            group.rmdir()
        time.sleep(0.1)


def _move(pid: int, group: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        (group / "cgroup.procs").write_text(str(pid))


def _processes_of(host: Host) -> list[int]:
    space, found = os.stat(f"/proc/{host.pid}/ns/pid").st_ino, []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{entry}/ns/pid").st_ino == space:
                found.append(int(entry))
    return found
