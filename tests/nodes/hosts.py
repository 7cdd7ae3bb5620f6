"""Hosts of their own on one machine: the processes, network, memory, mounts and name of each are in namespaces.

Namespaces live as long as the processes in them, and nothing of a host has a name outside: not its interfaces, not its
addresses. So clusters of several test processes do not meet, and whatever ends the test ends its hosts with all that
runs there: each is held by a process that waits for the end of a pipe from here.
"""

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support import launchers

ROOT = Path(__file__).parents[2]
NETWORK = "10.0.0"
LAUNCHER = ("-m", "fastckpt_run")
HOSTS = 16
"""How many can be in a cluster: their names and addresses are known to each of them from the start."""
WAIT = "echo ready; set +e; while read -r _; do :; done"
"""Not `cat`: bash also reaps the orphans of a host whose first process it is."""
BOOT = f"""set -e
echo "$1" > /proc/sys/kernel/hostname
mount -t tmpfs -o size=512m tmpfs /dev/shm
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/boot-id" /proc/sys/kernel/random/boot_id
if [ -n "$3" ]; then mount --bind "$2/disk" "$3"; fi
{WAIT}
"""


class HostError(Exception):
    """No host can be made."""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _held(*command: str) -> subprocess.Popen[bytes]:
    """A process that has begun to wait for the end of its input."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    assert process.stdout is not None and process.stderr is not None
    if process.stdout.readline() != b"ready\n":
        why = process.stderr.read().decode().strip()
        _release(process)
        raise HostError(f"{command[0]}: {why}")
    return process


def _release(process: subprocess.Popen[bytes]) -> None:
    """End what is held, and wait until nothing of it is left."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()
    process.wait(60)


def nsenter(pid: int, *command: str) -> list[str]:
    """A command in the namespaces of a host."""
    return ["nsenter", "--target", str(pid), "--net", "--mount", "--uts", "--ipc", "--pid", *command]


def name_of(number: int) -> str:
    """Names of hosts up to 9 sort as their numbers do."""
    return f"node{number}"


def address_of(number: int, *, ipv6: bool = False) -> str:
    return f"fd00::{number + 1:x}" if ipv6 else f"{NETWORK}.{number + 1}"


class Switch:
    """The network between hosts. Each port is named by a number of its own: that of a lost host vanishes late."""

    def __init__(self) -> None:
        self._process = _held("unshare", "--net", "bash", "-c", WAIT)
        self._ports = itertools.count()
        self._is_split = False
        self.run("ip", "link", "add", "switch", "type", "bridge")
        self.run("ip", "link", "set", "switch", "up")

    def connect(self, pid: int) -> str:
        """Lead a port to the interface eth0 of the network that a process is in; the port's name."""
        port = f"port{next(self._ports)}"
        self.run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self.run("ip", "link", "set", port, "master", "switch", "up")
        return port

    def split(self, ports: Iterable[str]) -> None:
        """Lead these ports to another switch, without a cable to this one."""
        if not self._is_split:
            self.run("ip", "link", "add", "apart", "type", "bridge")
            self.run("ip", "link", "set", "apart", "up")
        self._is_split = True
        for port in ports:
            self.run("ip", "link", "set", port, "master", "apart")

    def join(self, ports: Iterable[str]) -> None:
        """Undo `split`."""
        for port in ports:
            self.run("ip", "link", "set", port, "master", "switch")
        self.run("ip", "link", "delete", "apart")
        self._is_split = False

    def run(self, *command: str) -> str:
        return _run("nsenter", "--target", str(self._process.pid), "--net", *command)

    def close(self) -> None:
        _release(self._process)


class Host:
    """One host, from its boot to its end; its name and address follow from its number, as of one that replaces it."""

    def __init__(
        self, number: int, folder: Path, switch: Switch, own_storage: Path | None, *, ipv6: bool = False
    ) -> None:
        """Boot it, with one address; its disk is in ``folder``, and ``own_storage``, if given, on that."""
        self.number, self._folder, self._switch = number, folder, switch
        self._started: list[subprocess.Popen[bytes]] = []
        for path in (folder / "disk", folder / "tmp"):
            path.mkdir(parents=True, exist_ok=True)
        known = "".join(f"{address_of(each, ipv6=ipv6)} {name_of(each)}\n" for each in range(HOSTS))
        (folder / "hosts").write_text(f"{'::1' if ipv6 else '127.0.0.1'} localhost\n{known}")
        (folder / "boot-id").write_text(f"{uuid.uuid4()}\n")
        namespaces = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
        boot = ("bash", "-c", BOOT, "boot", name_of(number), str(folder), str(own_storage or ""))
        self._process = _held("unshare", *namespaces, *boot)
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self.pid = int(children.read_text())
        self.port = switch.connect(self.pid)
        address = (f"{address_of(number, ipv6=True)}/64", "nodad") if ipv6 else (f"{address_of(number)}/24",)
        self.run("ip", "address", "add", *address, "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "link", "set", "lo", "up")

    def run(self, *command: str) -> str:
        """What a command there prints; raises HostError if it fails."""
        return _run(*nsenter(self.pid, *command))

    def reaches(self, number: int) -> bool:
        """Whether another host answers within three seconds."""
        # A port at which nobody listens refuses, which is an answer.
        probe = f"timeout 3 bash -c ': > /dev/tcp/{name_of(number)}/1' 2>&1; true"
        return "refused" in self.run("bash", "-c", probe)

    def start(self, *command: str, output: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start Python there with these arguments; its output is appended to a file. A launcher is a fork if it can."""
        own = {"TMPDIR": str(self._folder / "tmp"), "FASTCKPT_SHM_DIR": "/dev/shm"}
        own |= {"OMP_NUM_THREADS": "1", "FASTCKPT_PRELOAD": "auto"}
        variables = {"PYTHONPATH": str(ROOT)} | os.environ | own | environment
        with output.open("ab") as file:
            if command[:2] == LAUNCHER and launchers.are_forked():
                entering = [str(Path(__file__).with_name("enter.py")), str(self.pid), *command[2:]]
                process = launchers.start(entering, variables, file.fileno())
            else:
                streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                line = nsenter(self.pid, sys.executable, *command)
                process = subprocess.Popen(line, env=variables, start_new_session=True, **streams)
        self._started.append(process)
        return process

    def pid_outside(self, pid: int) -> int:
        """The number, as seen from outside, of a process of this host; raises ProcessLookupError if there is none."""
        space = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if os.stat(f"/proc/{entry}/ns/pid").st_ino == space:
                    status = Path(f"/proc/{entry}/status").read_text()
                    numbers = next(line for line in status.splitlines() if line.startswith("NSpid:"))
                    if int(numbers.split()[-1]) == pid:
                        return int(entry)
        raise ProcessLookupError(f"{name_of(self.number)} has no process {pid}")

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process by the number that it has there."""
        os.kill(self.pid_outside(pid), number)

    def kill_all(self) -> None:
        """SIGKILL to all processes at once; memory, mounts and network stay."""
        self.run("bash", "-c", "kill -KILL -1")

    def unplug(self) -> None:
        """Take the cable out: the host's interface has no carrier."""
        self._switch.run("ip", "link", "set", self.port, "down")

    def mute(self) -> None:
        """Have the switch drop all that comes and goes; the host's interface stays up."""
        self._switch.run("bridge", "link", "set", "dev", self.port, "state", "0")

    def plug(self) -> None:
        """Undo `unplug` and `mute`."""
        self._switch.run("ip", "link", "set", self.port, "up")
        end = time.monotonic() + 10.0
        while True:
            try:
                self._switch.run("bridge", "link", "set", "dev", self.port, "state", "3")
                return
            except HostError:  # the kernel sees a carrier a moment after a port is up
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def lose(self) -> None:
        """End it as a power failure does: no packet leaves, and its processes and memory are gone."""
        self.unplug()
        self.close()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # the kernel kills all others of its namespace
        for process in self._started:
            process.wait(60)
        _release(self._process)


class Cluster:
    """Hosts on one switch, with storage that all share, or that each has by itself."""

    def __init__(self, folder: Path, *numbers: int, shares_storage: bool = True, ipv6: bool = False) -> None:
        self._ipv6 = ipv6
        self.folder, self.storage = folder, folder / "checkpoints"
        self.storage.mkdir(parents=True)
        self._own_storage = None if shares_storage else self.storage
        self.hosts: dict[int, Host] = {}
        self._switch = Switch()
        try:
            for number in numbers:
                self.add(number)
        except BaseException:
            self.close()
            raise

    def add(self, number: int) -> Host:
        """Boot a host, also one in the place of a lost one."""
        assert number not in self.hosts and number < HOSTS
        place = self.folder / name_of(number)
        self.hosts[number] = Host(number, place, self._switch, self._own_storage, ipv6=self._ipv6)
        return self.hosts[number]

    def lose(self, number: int) -> None:
        self.hosts.pop(number).lose()

    def split(self, *numbers: int) -> None:
        """Cut these hosts off from the others; they reach each other, those that were cut off before, and storage."""
        self._switch.split(self.hosts[number].port for number in numbers)

    def join(self, *numbers: int) -> None:
        """Undo `split`."""
        self._switch.join(self.hosts[number].port for number in numbers)

    def close(self) -> None:
        while self.hosts:
            self.hosts.popitem()[1].close()
        self._switch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@functools.cache
def obstacle() -> str:
    """Why no hosts can be made on this machine; empty if they can. Tried, since no list of rights would be complete."""
    try:
        with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "trial", 0, 1) as trial:
            if not trial.hosts[1].reaches(0):
                raise HostError("hosts on one switch do not reach each other")
    except (HostError, FileNotFoundError) as error:
        return f"no hosts of namespaces are permitted here: {error}"
    return ""
