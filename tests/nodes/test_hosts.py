"""Hosts made of namespaces: what each has of its own, and that nothing of them is left."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nodes.conftest import NewCluster
from tests.nodes.hosts import HostError


def test_a_host_has_its_own_name_memory_processes_boot_and_perhaps_storage(new_cluster: NewCluster) -> None:
    interfaces = os.listdir("/sys/class/net")
    for shares in (True, False):
        cluster = new_cluster(0, 1, shares_storage=shares)
        assert os.listdir("/sys/class/net") == interfaces
        for number, host in cluster.hosts.items():
            assert host.run("hostname").strip() == f"node{number}" != socket.gethostname()
            host.run("touch", f"/dev/shm/of-{number}", str(cluster.storage / f"of-{number}"))
            assert host.run("ls", "/dev/shm").split() == [f"of-{number}"]
            assert len(host.run("ps", "-e", "-o", "pid=").split()) == 2  # its first process, and ps
        boots = {host.run("cat", "/proc/sys/kernel/random/boot_id") for host in cluster.hosts.values()}
        assert len(boots | {Path("/proc/sys/kernel/random/boot_id").read_text()}) == 3
        assert not any(Path("/dev/shm").glob("of-*"))
        seen = [host.run("ls", str(cluster.storage)).split() for host in cluster.hosts.values()]
        assert seen == ([["of-0", "of-1"]] * 2 if shares else [["of-0"], ["of-1"]])
    with pytest.raises(HostError, match="no-such-file"):
        cluster.hosts[0].run("cat", "/no-such-file")


def test_a_host_without_its_link_reaches_nobody_and_one_in_the_place_of_a_lost_one_has_no_memory(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(0, 1)
    host = cluster.hosts[1]
    for cut, is_up in ((host.unplug, False), (host.mute, True)):
        assert cluster.hosts[0].reaches(1) and host.reaches(0)
        cut()
        assert not cluster.hosts[0].reaches(1) and not host.reaches(0)
        assert ("LOWER_UP" in host.run("ip", "link", "show", "eth0")) == is_up
        host.plug()
    program = "import os, signal; print(1, flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    running = [
        host.start("-c", text, output=cluster.folder / "output") for text in ("import time; time.sleep(600)", program)
    ]
    os.waitid(os.P_PID, running[1].pid, os.WSTOPPED | os.WNOWAIT)
    host.run("touch", "/dev/shm/kept")
    cluster.lose(1)
    assert running[0].wait(10) and running[1].wait(10) == -signal.SIGKILL
    assert not cluster.hosts[0].reaches(1)
    host = cluster.add(1)
    assert host.reaches(0) and cluster.hosts[0].reaches(1) and host.run("ls", "/dev/shm") == ""
    host.run("touch", "/dev/shm/kept")
    process = host.start("-c", "import time; time.sleep(600)", output=cluster.folder / "output")
    while len(host.run("ps", "-e", "-o", "pid=").split()) == 2:
        assert process.poll() is None
    host.kill_all()
    assert process.wait(10) == -9 and host.run("ls", "/dev/shm").split() == ["kept"], "its memory stays"


DYING = """
import os, sys, pathlib
from tests.nodes.hosts import Cluster
cluster = Cluster(pathlib.Path(sys.argv[1]), 0)
cluster.hosts[0].start('-c', 'import time; time.sleep(600)', output=cluster.folder / 'output')
print(cluster.hosts[0].pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_hosts_end_with_the_process_that_made_them(new_cluster: NewCluster, tmp_path: Path) -> None:
    """Even if that is killed: here by the end of a pipe that only it holds."""
    new_cluster()  # skips where there are none
    command = [sys.executable, "-c", DYING, str(tmp_path / "dying")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -9, done.stderr
    try:
        fd = os.pidfd_open(int(done.stdout))
    except ProcessLookupError:
        return
    with os.fdopen(fd):
        assert select.select([fd], [], [], 10)[0], "the host lives on"
