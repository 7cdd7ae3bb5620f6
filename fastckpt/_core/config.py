"""The only reader of the environment: settings of a job, and a worker's place in it."""

import logging
import math
import os
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from fastckpt._core.arguments import meant
from fastckpt._core.launcher_places import launcher_place, number
from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt")

AGENT_VARIABLE = "FASTCKPT_AGENT"
"""The variable with the address of the agent that launched a worker."""
PLACE_VARIABLE = "FASTCKPT_PLACE"
"""The variable with a worker's rank and its place among those of its node, which LOCAL_RANK may not be."""
SECRET_VARIABLE = "FASTCKPT_SECRET"
"""The variable with the secret of a job: no setting, so that it is shown nowhere."""
TRIAL_VARIABLE = "FASTCKPT_TRIAL"
"""The variable with the file in which a job that `fastckpt plan` tries notes its directories: no setting of users."""
PROOF_VARIABLE = "FASTCKPT_PROOF"
"""The variable with the folder for the record of a run that `fastckpt prove` compares: no setting of users."""
SHM = "/dev/shm"
AUTO = "auto"
MEMORY = "memory"
SHORT, FULL = "short", "full"
_SERVICE = re.compile(
    "FASTCKPT(_.+)?_(SERVICE_HOST|SERVICE_PORT|SERVICE_PORT_.+|PORT|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets in each pod beside a service of our name: no settings, and no mistake."""
_NO_SETTINGS = (AGENT_VARIABLE, PLACE_VARIABLE, SECRET_VARIABLE, TRIAL_VARIABLE, PROOF_VARIABLE)
_GROUP = re.compile("xor:([3-9]|1[0-6])")
_warned: set[str] = set()
LONGEST_NAME = 255
"""Characters that the name of a failure domain may have."""
LARGE_FILES = "/var/tmp"
"""The directory for large temporary files without TMPDIR: on many systems /tmp is a tmpfs."""


def variable(setting: str) -> str:
    """The environment variable of a setting, such as ``FASTCKPT_SHM_DIR`` of ``shm_dir``."""
    return f"FASTCKPT_{setting.upper()}"


@dataclass(frozen=True)
class Settings:
    """Settings of a job, which a user gives as ``--fast-*`` options or ``FASTCKPT_*`` variables.

    Attributes:
        shm_dir: Directory of the memory tier. It is on a tmpfs, or on a local disk.
        memory: Slots in shared memory, else on a disk. Then under $TMPDIR, or /var/tmp, or where shm_dir is a disk.
        slots: Slots for checkpoints, 2 or 3. With 3, two are used if memory is short.
        fill_threads: Threads that copy to memory; 0: idle cores. As many as the workers leave idle.
        flush: Persist memory on failure and at the end. Only saves that are newer than storage are written.
        flush_timeout: Longest wait for the flush at the end.
        require_persist: Fail if the last save is not durable. The exit code is 75.
        persist_mbps: Limit of persists of this node; 0: none. In 10**6 bytes per second.
        file_mode: Mode of files on storage, such as 0640. Directories get x where r is; empty: as umask says.
        take_over: Save where another job does, which ends. This launch does not wait for it.
        exclusive: Refuse stores that cannot tell jobs apart.
        check_overlap: Find unseen writes to overlapped tensors. Slow, for tests.
        max_stalls: Failures without progress that end a job. Kills from outside count a tenth; 0: any number.
        restart_budget: Restarts that progress gives back, as 1/h. Or 3/90min, up to --max-restarts; empty: none.
        stop_grace: From SIGTERM to SIGKILL after a failure. For the workers that did not fail; 0: SIGKILL at once.
        hang_timeout: Silence of a hung worker; or auto, off. See docs/operate/hangs.md.
        preload: Imports before workers are forked. auto, or a,b.c; --fast-no-preload: workers are executed.
        allow_lost_rank_state: Resume without lost rank states. A newer save counts though files as rank_1.pt are lost.
        summary: Summary at the end: short, full. short: three lines; full: each checkpoint directory, all lost time.
        exit_codes: Exit with codes for schedulers. 75: start again; 76: elsewhere; 74: mend storage; 1: neither.
        secret_file: Secret that the agents of a job share. Only the owner may read the file; empty: none.
        node_timeout: Silence after which a node is lost. 1 or more; in the last quarter it can refute its loss.
        node_check: Check each node before it first joins. Again after it has failed.
        spares: Spare hosts, in addition to --nnodes. Each waits for the place of a lost one.
        exclude_after: Failures after which a spare replaces a host. Of that host alone; 0: any number.
        domain: Name of hosts that fail with this one. Or file:PATH or env:NAME that has it; empty: the host alone.
        replicas: Copies on other hosts: 0-2, auto, xor:G. auto: 1 if room; xor: parity (docs/clusters/nodes.md).
        replica_mbps: Limit of copies sent by this node; 0: none. In 10**6 bytes per second.
        replica_medium: Copies of others in memory or disk:DIR. DIR is a directory of this host alone.
        metrics_port: Serve metrics, and a live page; 0: any port. On each agent, the page on the first; empty: none.
        tensorboard: Write metrics for TensorBoard. Empty: none.
        event_log: Event log in the checkpoint directory. In .fastckpt/events.
        events: Append events to this file, as JSON. One object per event, of agent and workers; empty: none.
        slow_ranks: Report ranks that slow down the others.
    """

    shm_dir: str = SHM
    memory: bool = True
    slots: int = 3
    flush: bool = True
    require_persist: bool = False
    flush_timeout: float = 600.0
    persist_mbps: float = 0.0
    file_mode: str = ""
    fill_threads: int = 0
    check_overlap: bool = False
    max_stalls: int = 3
    restart_budget: str = ""
    stop_grace: float = 0.0
    take_over: bool = False
    exclusive: bool = True
    preload: str = AUTO
    hang_timeout: str = AUTO
    allow_lost_rank_state: bool = False
    node_timeout: float = 2.0
    event_log: bool = True
    events: str = ""
    secret_file: str = ""
    metrics_port: str = ""
    tensorboard: str = ""
    slow_ranks: bool = True
    node_check: bool = False
    spares: int = 0
    exclude_after: int = 2
    replicas: str = AUTO
    replica_mbps: float = 0.0
    replica_medium: str = MEMORY
    domain: str = ""
    summary: str = SHORT
    exit_codes: bool = False

    def __post_init__(self) -> None:
        self._demand("slots", self.slots in (2, 3), "an arena has 2 or 3 slots: give one of these")
        self._demand("flush_timeout", self.flush_timeout >= 0, "give seconds, 0 or more")
        self._demand("persist_mbps", 0 <= self.persist_mbps < math.inf, "give MB per second, or 0 for no limit")
        self._demand(
            "file_mode",
            not self.file_mode or _is_mode(self.file_mode),
            "give an octal mode from 0600 to 0666 in which the owner reads and writes and nobody executes, such as "
            "0640, or nothing to follow the umask",
        )
        self._demand("fill_threads", self.fill_threads >= 0, "give a number of threads, or 0 to let us choose")
        self._demand("max_stalls", self.max_stalls >= 0, "give a number of failures, or 0 for no limit")
        self._demand("stop_grace", 0 <= self.stop_grace < math.inf, "give seconds, or 0 to kill workers at once")
        waits = self.hang_timeout in (AUTO, "off") or _is_positive(self.hang_timeout)
        self._demand("hang_timeout", waits, "give a number of seconds, auto or off")
        self._demand("summary", self.summary in (SHORT, FULL), f"give {SHORT} or {FULL}")
        self._demand("spares", self.spares >= 0, "give a number of hosts, or 0 for none")
        self._demand("exclude_after", self.exclude_after >= 0, "give a number of failures, or 0 for no limit")
        is_scheme = self.replicas in ("0", "1", "2", AUTO) or _GROUP.fullmatch(self.replicas) is not None
        self._demand(
            "replicas", is_scheme, "give 0, 1 or 2 copies, xor:3 to xor:16 for parity of so many hosts, or auto"
        )
        # Below 1 a partner would take the time from one portion to the next for the end of the connection.
        is_rate = self.replica_mbps == 0 or 1 <= self.replica_mbps <= 1e9
        self._demand("replica_mbps", is_rate, "give 1 MB per second or more, or 0 for no limit")
        kind, _, directory = self.replica_medium.partition(":")
        is_medium = self.replica_medium == MEMORY or (kind == "disk" and Path(directory).is_absolute())
        self._demand(
            "replica_medium", is_medium, "give memory, or disk:DIR with the absolute path of a directory of this host"
        )
        # A quarter of it has to hold a connection of a loaded host, and three handshakes.
        self._demand("node_timeout", 1.0 <= self.node_timeout < math.inf, "give seconds, 1 or more")

    def _demand(self, name: str, is_met: bool, allowed: str) -> None:
        if not is_met:
            option = f"--fast-{name.replace('_', '-')}"
            raise ConfigError(f"{name} is {getattr(self, name)!r}; {allowed} ({option}, {variable(name)})")

    @property
    def arenas(self) -> str:
        """The directory under which arenas are made."""
        return self.shm_dir if self.memory or self.shm_dir != SHM else large_files()

    @property
    def copies(self) -> int:
        """Copies that other hosts keep of large files that one host alone has."""
        return 1 if self.replicas == AUTO else 0 if self.parity else int(self.replicas)

    @property
    def copies_directory(self) -> Path | None:
        """The directory on a disk for large files of other hosts; None to keep them in memory."""
        _, _, directory = self.replica_medium.partition(":")
        return Path(directory) if directory else None

    @property
    def parity(self) -> int:
        """Hosts of a group that keeps parity instead of copies; 0 for none."""
        group = _GROUP.fullmatch(self.replicas)
        return int(group[1]) if group else 0

    def failure_domain(self) -> str:
        """The name of the hosts that fail together with this one; empty for it alone; raises ConfigError."""
        kind, _, where = self.domain.partition(":")
        found = os.environ.get(where, "") if kind == "env" else self.domain
        if kind == "file":
            try:
                found = _start_of(where)
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or error
                raise ConfigError(f"domain is {self.domain!r}; {where} cannot be read: {why}") from error
        found = found.strip()
        empty = f"{where} is not set or empty" if kind == "env" else f"{where or 'it'} is empty"
        self._demand("domain", bool(found) or not self.domain, f"{empty}: give the name of what fails together")
        # Each agent sends it to all others, and they log it.
        is_name = found.isprintable() and len(found) <= LONGEST_NAME
        self._demand("domain", is_name, f"give a name in one line, of {LONGEST_NAME} characters at most")
        return found

    @property
    def elsewhere(self) -> list[str]:
        """Directories under which other launches may have made theirs."""
        return [place for place in (SHM, large_files()) if place != self.arenas]

    @property
    def mode(self) -> int | None:
        """The mode of files on storage; None to follow the umask."""
        return int(self.file_mode, 8) if self.file_mode else None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Read ``FASTCKPT_*``; raises ConfigError naming one that cannot be read, and warns of unknown ones."""
        environment = os.environ if environment is None else environment
        _warn_of_unknown(
            environment,
            {*_NO_SETTINGS, *(variable(field.name) for field in fields(cls))},
        )
        found = {f.name: environment[variable(f.name)] for f in fields(cls) if variable(f.name) in environment}
        values: dict[str, Any] = {name: _parse(cls, name, text) for name, text in found.items()}
        return cls(**values)

    def to_environment(self) -> dict[str, str]:
        """The variables from which `from_environment` reads these settings again."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {variable(n): str(int(v)) if isinstance(v, bool) else str(v) for n, v in values.items()}


def trial_record() -> str:
    """The file of a job that `fastckpt plan` tries, which must touch no checkpoint of the user's; empty for others."""
    return os.environ.get(TRIAL_VARIABLE, "")


def proof_folder() -> str:
    """The folder for the record of a run that `fastckpt prove` compares; empty for other jobs."""
    return os.environ.get(PROOF_VARIABLE, "")


def copy_of_environment() -> dict[str, str]:
    """All variables, for code that runs at import.

    fastckpt-run forks workers only from a process whose imports read nothing from os.environ that differs between
    workers. Reading a copy declares that the value does not end up in a forked worker.
    """
    return {os.fsdecode(name): os.fsdecode(value) for name, value in os.environb.items()}


def _warn_of_unknown(environment: Mapping[str, str], known: Set[str]) -> None:
    """Warn once of variables that look like settings; workers do not repeat the warnings of their launcher."""
    if AGENT_VARIABLE in environment or environment.get("LOCAL_RANK", "0") != "0":
        return
    for name in environment:
        if name.startswith(variable("")) and name not in {*known, *_warned} and not _SERVICE.fullmatch(name):
            _warned.add(name)
            near = meant(name, known).replace("'", "") or f"; there are {', '.join(sorted(known - {AGENT_VARIABLE}))}"
            logger.warning("%s is set, but is no setting of fastckpt%s", name, near)


def large_files() -> str:
    """The directory for large temporary files."""
    return os.environ.get("TMPDIR") or LARGE_FILES


def _start_of(path: str) -> str:
    """The text of a file, as far as it could be a name; raises OSError or ValueError, and never waits for a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 8 * LONGEST_NAME).decode()
    finally:
        os.close(descriptor)


def _is_mode(text: str) -> bool:
    return re.fullmatch("(0o?)?6[0246]{2}", text) is not None


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _parse(settings: type[Settings], name: str, text: str) -> object:
    default = getattr(settings, name)
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    try:
        return words[text.lower()] if isinstance(default, bool) else type(default)(text)
    except (KeyError, ValueError) as error:
        kind = "yes or no" if isinstance(default, bool) else {int: "a whole number", float: "a number"}[type(default)]
        raise ConfigError(f"{variable(name)} is {text!r}; give {kind}") from error


@dataclass(frozen=True)
class RankInfo:
    """The place of this process in the job, from torchrun's variables.

    Without a launcher it is the only worker of a job of one.

    Attributes:
        store_outlives_workers: True if the process group is formed in a store of torchrun's, also by restarted workers.
        gloo_is_lazy: True if ranks connect when they first talk, and so need each other's addresses until then.
        contradiction: Why variables give no place on the node, or too little; empty if they give one.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    group_rank: int = 0
    group_world_size: int = 1
    restart_count: int = 0
    run_id: str = ""
    master: str = ""
    agent: str = ""
    error_file: str = ""
    store_outlives_workers: bool = False
    gloo_is_lazy: bool = False
    contradiction: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Read RANK, LOCAL_RANK and the other variables that a launcher sets; raises as `launcher_place`."""
        environment = os.environ if environment is None else environment
        if "RANK" not in environment:
            return cls(agent=environment.get(AGENT_VARIABLE, ""))

        rank, world_size = number(environment, "RANK", 0), number(environment, "WORLD_SIZE", 1)
        place = launcher_place(environment, rank, world_size)
        # Of another rank, or with a LOCAL_RANK, it is that of a worker that has started this process.
        own, _, local_rank = environment.get(PLACE_VARIABLE, "").partition(" ")
        is_given = own == str(rank) and number(environment, "LOCAL_RANK", 0) == 0 and local_rank.isdecimal()
        return cls(
            rank=rank,
            local_rank=min(int(local_rank), place.local_world_size - 1) if is_given else place.local_rank,
            world_size=world_size,
            local_world_size=place.local_world_size,
            group_rank=place.group_rank,
            group_world_size=place.group_world_size,
            restart_count=number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
            run_id=environment.get("TORCHELASTIC_RUN_ID", ""),
            master=":".join(environment[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environment),
            agent=environment.get(AGENT_VARIABLE, ""),
            error_file=environment.get("TORCHELASTIC_ERROR_FILE", ""),
            store_outlives_workers=environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
            gloo_is_lazy=environment.get("TORCH_GLOO_LAZY_INIT", "0") != "0",
            contradiction=place.contradiction,
        )
