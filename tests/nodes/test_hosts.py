"""Hosts made of namespaces: what each has of its own, and that nothing of them is left."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nodes.hosts import Cluster, HostError

NewCluster = Callable[..., Cluster]


def test_a_host_has_its_own_name_memory_processes_and_boot(new_cluster: NewCluster) -> None:
    interfaces = os.listdir("/sys/class/net")
    cluster = new_cluster(0, 1)
    assert os.listdir("/sys/class/net") == interfaces
    for number, host in cluster.hosts.items():
        assert host.run("hostname").strip() == f"node{number}" != socket.gethostname()
        host.run("touch", f"/dev/shm/of-{number}")
        assert host.run("ls", "/dev/shm").split() == [f"of-{number}"]
        assert len(host.run("ps", "-e", "-o", "pid=").split()) == 2  # its first process, and ps
    boots = {host.run("cat", "/proc/sys/kernel/random/boot_id") for host in cluster.hosts.values()}
    assert len(boots | {Path("/proc/sys/kernel/random/boot_id").read_text()}) == 3
    assert not any(Path("/dev/shm").glob("of-*"))


def test_hosts_share_storage_or_have_their_own_under_one_name(new_cluster: NewCluster) -> None:
    for shares in (True, False):
        cluster = new_cluster(0, 1, shares_storage=shares)
        for number, host in cluster.hosts.items():
            host.run("touch", str(cluster.storage / f"of-{number}"))
        seen = [host.run("ls", str(cluster.storage)).split() for host in cluster.hosts.values()]
        assert seen == ([["of-0", "of-1"]] * 2 if shares else [["of-0"], ["of-1"]])


def test_a_host_without_its_link_reaches_nobody(new_cluster: NewCluster) -> None:
    cluster = new_cluster(0, 1)
    host = cluster.hosts[1]
    for cut, is_up in ((host.unplug, False), (host.mute, True)):
        assert cluster.hosts[0].reaches(1) and cluster.hosts[1].reaches(0)
        cut()
        assert not cluster.hosts[0].reaches(1) and not cluster.hosts[1].reaches(0)
        assert ("LOWER_UP" in host.run("ip", "link", "show", "eth0")) == is_up
        host.plug()


def test_a_fresh_host_in_the_place_of_a_lost_one_is_reached_and_its_memory_is_empty(new_cluster: NewCluster) -> None:
    cluster = new_cluster(0, 1)
    assert cluster.hosts[0].reaches(1)
    cluster.hosts[1].run("touch", "/dev/shm/kept")
    running = cluster.hosts[1].start("-c", "import time; time.sleep(600)", output=cluster.folder / "output")
    cluster.lose(1)
    assert running.wait(10) != 0
    assert not cluster.hosts[0].reaches(1)
    cluster.add(1)
    assert cluster.hosts[1].reaches(0) and cluster.hosts[0].reaches(1)
    assert cluster.hosts[1].run("ls", "/dev/shm") == ""


def test_all_processes_of_a_host_are_killed_and_its_memory_stays(new_cluster: NewCluster) -> None:
    cluster = new_cluster(0)
    host = cluster.hosts[0]
    outputs = [cluster.folder / f"output-{number}" for number in range(2)]
    running = [host.start("-c", "import time; print(1, flush=True); time.sleep(600)", output=each) for each in outputs]
    end = time.monotonic() + 60
    while not all(each.read_text() for each in outputs):
        assert time.monotonic() < end, "they do not come to the host"
        time.sleep(0.01)
    host.run("touch", "/dev/shm/kept")
    host.kill_all()
    assert [process.wait(10) for process in running] == [-9, -9]
    assert host.run("ls", "/dev/shm").split() == ["kept"]


def test_a_host_with_a_stopped_process_ends(new_cluster: NewCluster) -> None:
    cluster = new_cluster(0)
    program = "import os, signal; print(1, flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    running = cluster.hosts[0].start("-c", program, output=cluster.folder / "output")
    os.waitid(os.P_PID, running.pid, os.WSTOPPED | os.WNOWAIT)
    cluster.lose(0)
    assert running.wait(10) == -signal.SIGKILL


def test_hosts_end_with_the_process_that_made_them(new_cluster: NewCluster, tmp_path: Path) -> None:
    """Even if that is killed: here by the end of a pipe that only it holds."""
    new_cluster()  # skips where there are none
    program = (
        "import os, sys, pathlib; from tests.nodes.hosts import Cluster\n"
        "cluster = Cluster(pathlib.Path(sys.argv[1]), 0)\n"
        "cluster.hosts[0].start('-c', 'import time; time.sleep(600)', output=cluster.folder / 'output')\n"
        "print(cluster.hosts[0].pid, flush=True); os.kill(os.getpid(), 9)"
    )
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ['PYTHONPATH']}"}
    command = [sys.executable, "-c", program, str(tmp_path / "dying")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -9, done.stderr
    first = int(done.stdout)
    try:
        fd = os.pidfd_open(first)
    except ProcessLookupError:
        return
    with os.fdopen(fd):
        assert select.select([fd], [], [], 10)[0], "the host lives on"


def test_a_command_that_fails_on_a_host_raises(new_cluster: NewCluster) -> None:
    with pytest.raises(HostError, match="no-such-file"):
        new_cluster(0).hosts[0].run("cat", "/no-such-file")
