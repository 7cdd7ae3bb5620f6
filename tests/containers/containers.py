"""Pods and containers of namespaces: what a container shares with the one that takes its place, and what not.

As kubelet makes them: a pod has a network, mounts and a tmpfs for /dev/shm, which outlives its containers. A container
has a pid namespace, in which the command is process 1: with it all of its processes die. Nothing of either has a name
outside, and a pod ends with the process that made it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ADDRESS, NAMES = "10.0.0.1", ("train-0", "train-1")
"""Of a pod, and the names that its containers may have."""
TEMPORARY = "/mnt"
"""A tmpfs in containers whose root is read-only."""
WAIT = 'mount -t tmpfs -o "$1" tmpfs "$2"; echo ready; while read -r _; do :; done'
"""Not `cat`: bash also reaps. The pod's memory is a tmpfs in its mounts alone."""
ENTER = r"""set -e
hostname "$1"; mount --bind "$2" /dev/shm
mount --bind "$5" /etc/hosts
if [ -n "$3" ]; then
    mount --bind "$3" "$3"; mount -t tmpfs tmpfs "$4"
    if [ -n "$6" ]; then  # Python is in a directory of root's, where others do not come
        mkdir "$4/python"; mount --bind "$7" "$4/python"
        mount -t tmpfs -o mode=755 tmpfs "$6"; mkdir -p "$7"; mount --bind "$4/python" "$7"
        umount "$4/python"; rmdir "$4/python"
    fi
    mount -o remount,ro,bind /
fi
shift 7; exec "$@"
"""


class ContainerError(Exception):
    """No pod can be made."""


class Container:
    """A container that runs.

    Attributes:
        process: Ends when the container has, with its exit code: -N if signal N killed its first process.
        pid: Of its first process, as seen from outside.
    """

    def __init__(self, process: subprocess.Popen[bytes], pid: int) -> None:
        self.process, self.pid = process, pid

    def signal(self, number: int) -> None:
        """Send a signal to its first process, as `docker stop` and kubelet do."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as the kernel does out of memory, or kubelet after the grace period: all processes die at once."""
        self.signal(signal.SIGKILL)
        self.process.wait(60)

    def wait(self, seconds: float = 120.0) -> int:
        """Its exit code."""
        return self.process.wait(seconds)


class Pod:
    """What containers of one pod share: a network with nothing but a loopback, and memory."""

    def __init__(self, folder: Path, memory: str = "size=512m,mode=1777") -> None:
        """Make one. ``memory`` are options of the tmpfs that containers find at /dev/shm."""
        self.shm = folder / "shm"
        self.shm.mkdir(parents=True)
        self._folder = folder
        self._containers: list[Container] = []
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = ["unshare", "--net", "--mount", "--uts", "--ipc", "bash", "-ec", WAIT, "pod", memory, str(self.shm)]
        self._holder = subprocess.Popen(command, start_new_session=True, **pipes)
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != b"ready\n":
            raise ContainerError(f"no pod can be made: {self._holder.stderr.read().decode().strip()}")
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "address", "add", ADDRESS, "dev", "lo")
        for name in NAMES:
            (folder / f"hosts-{name}").write_text(f"127.0.0.1 localhost\n{ADDRESS} {name}\n")

    def run(self, *command: str) -> str:
        """What a command in the pod's mounts and network prints."""
        done = subprocess.run([*self._enter(), *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ContainerError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def _enter(self) -> list[str]:
        return ["nsenter", "--target", str(self._holder.pid), "--net", "--mount", "--uts", "--ipc"]

    def start(
        self,
        *command: str,
        output: Path,
        environment: Mapping[str, str],
        name: str = "train-0",
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
        hosts = self._folder / f"hosts-{name}"
        # Its own uts, too, so that a container can have another name than the one before it.
        spaces = ("--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc")
        places = str(self.shm), str(volume or ""), TEMPORARY, str(hosts), *_closed(Path(sys.base_prefix))
        line = [*self._enter(), "unshare", *spaces, "bash", "-c", ENTER, "enter", name, *places]
        with output.open("ab") as file:
            process = subprocess.Popen(
                [*line, *privileges, *command],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, env=dict(environment),
            )  # fmt: skip
        self._containers.append(Container(process, _child_of(process)))
        return self._containers[-1]

    def close(self) -> None:
        for container in self._containers:
            if container.process.poll() is None:
                container.kill()
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            pipe.close()
        self._holder.wait(60)


def python(*arguments: str) -> tuple[str, ...]:
    """The command of a container that runs Python."""
    return (sys.executable, *arguments)


def _closed(path: Path) -> tuple[str, str]:
    """The first directory on the way to ``path`` that is closed to others, and ``path``; empty if none is."""
    closed = [str(each) for each in reversed(path.parents) if not each.stat().st_mode & 0o001]
    return (closed[0], str(path)) if closed else ("", "")


def _child_of(process: subprocess.Popen[bytes]) -> int:
    """The first process of the pid namespace that ``unshare`` makes."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        try:
            if found := children.read_text().split():
                return int(found[0])
        except (FileNotFoundError, ProcessLookupError):
            break
    raise ContainerError(f"the container has ended at once, with exit code {process.wait()}")
