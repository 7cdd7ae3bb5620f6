"""Slurm on hosts that are namespaces: its controller on the first, a slurmd on each other one, munge for all.

Nothing of it is the machine's: configuration, keys, sockets, state and logs are in the test's directory.
"""

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.nodes.hosts import ROOT, Cluster, Host, name_of

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
DEADLINE = 300.0
CORES = len(os.sched_getaffinity(0))
"""Of each node: Slurm binds a task to its cores, which have to be there."""
_CONTROLLER = 0
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n/slurmd.log
SlurmctldPort=6817
SlurmdPort=6818
SlurmctldTimeout=30
SlurmdTimeout=10
KillWait=30
InactiveLimit=0
ReturnToService=2
JobRequeue=1
NodeName={nodes} CPUs={cores} Sockets=1 CoresPerSocket={cores} ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1
PartitionName=urgent Nodes={nodes} MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=9
"""


def obstacle() -> str:
    """Why there is no Slurm here; empty if there is, perhaps only now that its packages were installed."""
    if not _is_installed():
        options = ("-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends")
        # Not to start daemons: Debian's policy-rc.d for that is not everywhere.
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        subprocess.run(["apt-get", *options, *PACKAGES], env=environment, capture_output=True, check=False)
    return "" if _is_installed() else f"apt cannot install {', '.join(PACKAGES)}"


def _is_installed() -> bool:
    return all(
        any(Path(place, name).exists() for place in ("/usr/sbin", "/usr/bin"))
        for name in ("slurmctld", "slurmd", "munged")
    )


class Slurm:
    """A controller on host 0 and nodes on the others, until it is closed."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.folder = cluster, cluster.folder / "slurm"
        self.work = cluster.folder / "work"
        self._daemons: list[subprocess.Popen[bytes]] = []
        for path in (self.folder / "munge", self.folder / "state", self.work, self.folder / "bin"):
            path.mkdir(parents=True)
        for number in cluster.hosts:
            (self.folder / name_of(number) / "spool").mkdir(parents=True)
        nodes = ",".join(name_of(number) for number in cluster.hosts if number != _CONTROLLER)
        text = _CONFIGURATION.format(controller=name_of(_CONTROLLER), folder=self.folder, nodes=nodes, cores=CORES)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "bin/fastckpt-run").write_text(f'#!/bin/sh\nexec {sys.executable} -m fastckpt_run "$@"\n')
        (self.folder / "bin/fastckpt-run").chmod(0o755)
        key = self.folder / "munge/key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        munge = {name: f"{self.folder}/munge/{name}" for name in ("socket", "pid", "log", "seed")}
        self._start(
            cluster.hosts[_CONTROLLER], "munged", "--foreground", "--force", f"--key-file={key}",
            f"--socket={munge['socket']}", f"--pid-file={munge['pid']}", f"--log-file={munge['log']}",
            f"--seed-file={munge['seed']}", "--num-threads=2",
        )  # fmt: skip
        self.until(lambda: Path(munge["socket"]).exists(), "munge's socket")
        self._start(cluster.hosts[_CONTROLLER], "slurmctld", "-D", "-i")
        for number in cluster.hosts:
            if number != _CONTROLLER:
                self.start_node(number)
        count = len(cluster.hosts) - 1
        self.until(lambda: self("sinfo", "-hN", "-p", "main", "-o", "%T").split() == ["idle"] * count, "idle nodes")

    def start_node(self, number: int) -> None:
        self._start(self.cluster.hosts[number], "slurmd", "-D", "-N", name_of(number))

    def kill_node(self, number: int) -> None:
        """Send SIGKILL to the slurmd of a host; what it has started lives on."""
        host = self.cluster.hosts[number]
        host.kill(int((self.folder / name_of(number) / "slurmd.pid").read_text()))

    def agents(self, number: int) -> list[int]:
        """The agents of jobs on a host, by the numbers that they have there, the oldest first."""
        found = self.cluster.hosts[number].run("bash", "-c", "pgrep -f '[-]m fastckpt_run ' || true")  # none: code 1
        return [int(pid) for pid in found.split()]

    def _start(self, host: Host, *command: str) -> None:
        with (self.folder / f"{command[0]}.{name_of(host.number)}.out").open("ab") as output:
            process = subprocess.Popen(
                host._command(*command), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=self._environment(), start_new_session=True,
            )  # fmt: skip
        self._daemons.append(process)

    def _environment(self) -> dict[str, str]:
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        own = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path, "PYTHONPATH": str(ROOT), "TMPDIR": "/tmp"}
        return os.environ | own | {"OMP_NUM_THREADS": "1", "FASTCKPT_SHM_DIR": "/dev/shm", "FASTCKPT_PRELOAD": "auto"}

    def __call__(self, *command: str, check: bool = True, **environment: str) -> str:
        done = subprocess.run(
            self.cluster.hosts[_CONTROLLER]._command(*command), capture_output=True, text=True, check=False,
            env=self._environment() | environment, cwd=self.work, timeout=60,
        )  # fmt: skip
        assert not check or not done.returncode, f"{command}: {done.stderr}"
        return done.stdout

    def submit(self, *arguments: str, **environment: str) -> str:
        return re.findall(r"\d+", self("sbatch", "--chdir", str(self.work), *arguments, **environment))[-1]

    def job(self, name: str) -> dict[str, str]:
        text = self("scontrol", "show", "job", "--oneliner", name, check=False)
        return dict(pair.split("=", 1) for pair in text.split() if "=" in pair)

    def state(self, name: str) -> str:
        return self.job(name).get("JobState", "")

    def until(self, condition: Callable[[], object], what: str, seconds: float = DEADLINE) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                if condition():
                    return
            except (AssertionError, OSError):
                pass  # a controller that does not answer yet
            assert time.monotonic() < end, f"{what} did not come true in {seconds:.0f} s"
            time.sleep(0.1)

    def close(self) -> None:
        self.cluster.close()
        for process in self._daemons:
            process.kill()
            process.wait(60)
