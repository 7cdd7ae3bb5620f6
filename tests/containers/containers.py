"""Pods and containers on a host of tests/nodes: what a container shares with the one that takes its place.

As kubelet makes them: a pod has a network, mounts and a tmpfs for /dev/shm, which outlives its containers. A container
has a pid namespace, in which the command is process 1: with it all of its processes die.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.nodes.hosts import Cluster, address_of, name_of, nsenter

NAMES = ("train-0", "train-1")
"""The names that containers of a pod may have."""
TEMPORARY = "/mnt"
"""A tmpfs in containers whose root is read-only."""
SPACES = ("--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc")
"""Its own uts, too, so that a container can have another name than the one before it."""
ENTER = r"""set -e
hostname "$1"
if [ -n "$2" ]; then
    mount --bind "$2" "$2"; mount -t tmpfs tmpfs "$3"
    if [ -n "$4" ]; then  # Python is in a directory of root's, where others do not come
        mkdir "$3/python"; mount --bind "$5" "$3/python"
        mount -t tmpfs -o mode=755 tmpfs "$4"; mkdir -p "$5"; mount --bind "$3/python" "$5"
        umount "$3/python"; rmdir "$3/python"
    fi
    mount -o remount,ro,bind /
fi
shift 5; exec "$@"
"""


class Container:
    """A container that runs.

    Attributes:
        process: Ends when the container has, with its exit code: -N if signal N killed its first process.
        pid: Of its first process, as seen from outside.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pid = _child_of(process, _child_of(process, process.pid))  # of unshare, which nsenter has started

    def signal(self, number: int) -> None:
        """Send a signal to its first process, as `docker stop` and kubelet do."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as the kernel does out of memory, or kubelet after the grace period: all processes die at once."""
        self.signal(signal.SIGKILL)
        self.process.wait(60)

    def wait(self, seconds: float = 120.0) -> int:
        return self.process.wait(seconds)


class Pod:
    """A host whose containers share its network and memory."""

    def __init__(self, cluster: Cluster, memory: str = "") -> None:
        """Make one of host 0. ``memory`` are options of the tmpfs that containers find at /dev/shm."""
        self.host = cluster.hosts[0]
        with (cluster.folder / name_of(0) / "hosts").open("a") as known:
            known.write(f"{address_of(0)} {' '.join(NAMES)}\n")
        if memory:
            self.host.run("mount", "-t", "tmpfs", "-o", memory, "tmpfs", "/dev/shm")

    def start(
        self,
        *command: str,
        output: Path,
        environment: Mapping[str, str],
        name: str = NAMES[0],
        privileges: tuple[str, ...] = (),
        volume: Path | None = None,
    ) -> Container:
        """Start a container whose process 1 is this command; its output is appended to a file.

        Args:
            command: What it runs.
            output: Where its output goes.
            environment: Its variables.
            name: Its host name, one of those that have an address.
            privileges: A command such as setpriv that starts another one with fewer rights.
            volume: If given, nothing can be written but there, in TEMPORARY, and in memory.
        """
        places = (str(volume or ""), TEMPORARY, *_closed(Path(sys.base_prefix)))
        line = nsenter(self.host.pid, "unshare", *SPACES, "bash", "-c", ENTER, "enter", name, *places)
        with output.open("ab") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            started = [*line, *privileges, *command]
            return Container(subprocess.Popen(started, start_new_session=True, env=dict(environment), **streams))


def python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


def _closed(path: Path) -> tuple[str, str]:
    """The first directory on the way to ``path`` that is closed to others, and ``path``; empty if none is."""
    closed = [str(each) for each in reversed(path.parents) if not each.stat().st_mode & 0o001]
    return (closed[0], str(path)) if closed else ("", "")


def _child_of(process: subprocess.Popen[bytes], pid: int) -> int:
    while process.poll() is None:
        if found := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            return int(found[0])
        time.sleep(0.001)
    raise ChildProcessError(f"the container has ended at once, with exit code {process.wait()}")
