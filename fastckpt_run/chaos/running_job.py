"""Finds the processes of a running job by its checkpoint directory: those that signed its memory, and no others."""

import contextlib
import pwd
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastckpt._core.memory.census import ArenaEntry, ArenaState, census
from fastckpt._core.memory.processes import Process, boot_id, stat_of
from fastckpt._core.memory.telemetry import Telemetry, TelemetryBlock, telemetry_name
from fastckpt._core.report.events import Event, text, whole
from fastckpt._core.storage.store import as_path, is_url, normalised
from fastckpt.errors import ConfigError, FastckptError
from fastckpt_run.chaos.job_events import JobEvents, ending, last

Ranks = list[Telemetry]


@dataclass(frozen=True)
class LocalAgent:
    """An agent of a job on this host.

    Attributes:
        arena: Its memory, which an agent that is launched later adopts under the same name.
        process: The agent itself.
        workers: Its workers that have a checkpointer.
    """

    arena: Path
    process: Process
    workers: tuple[Process, ...]

    def telemetry(self) -> Ranks:
        """The last reports of its local ranks; [] while there is no block of them."""
        try:
            block = TelemetryBlock(telemetry_name(self.arena))
        except FastckptError:
            return []
        try:
            return [block.read(rank) for rank in range(block.ranks)]
        finally:
            block.close()

    def worker(self, pid: int) -> Process | None:
        """The worker that has reported under this number, if it is one that signed."""
        return next((each for each in self.workers if each.pid == pid), None)


@dataclass(frozen=True)
class RunningJob:
    """A job that runs on this host, for this user.

    Attributes:
        location: Its checkpoint directory, as one text for each place.
        shm_dir: The tmpfs that holds arenas.
        agents: Its agents on this host; one, unless a test has several nodes on it.
        nodes: The nodes of its round.
        events: Events that its agents have recorded.
    """

    location: str
    shm_dir: Path
    agents: list[LocalAgent]
    nodes: int
    events: JobEvents


def find_job(directory: str, shm_dir: str) -> RunningJob:
    """The job that checkpoints to ``directory``; raises ConfigError where none of this user runs here, or two do."""
    if not is_url(directory) and not (directory and Path(as_path(directory)).is_dir()):
        raise ConfigError(f"{directory or 'nothing'} is no directory; give the checkpoint directory of a running job")
    location, events = normalised(directory), JobEvents(normalised(directory))
    events.grow()
    agents = agents_of(location, Path(shm_dir))
    if not agents:
        raise ConfigError(_why_none(location, shm_dir, events))
    launches = {agent.process.pid: events.of_agent(agent.process.pid) for agent in agents}
    names = {text(last(launch, "job_started"), "run_id") for launch in launches.values()}
    if len(agents) > 1 and (len(names) > 1 or names == {""}):
        pids = ", ".join(str(agent.process.pid) for agent in agents)
        raise ConfigError(f"two jobs save to {location} (agents {pids}): end one of them, or give it another directory")
    _check_fit(agents, location)
    nodes = max(whole(last(launch, "rendezvous"), "nodes", 1) for launch in launches.values())
    return RunningJob(location, Path(shm_dir), agents, nodes, events)


def agents_of(location: str, shm_dir: Path) -> list[LocalAgent]:
    """The live agents of this user on this host with this checkpoint directory."""
    return [
        LocalAgent(entry.path, entry.owner, entry.writers)
        for entry in _census(shm_dir)
        if entry.directory == location and entry.state is ArenaState.IN_USE and entry.owner and entry.owner.is_alive()
    ]


def _check_fit(agents: list[LocalAgent], location: str) -> None:
    """Raise ConfigError for a job that nobody restarts, and for one that this process is a part of."""
    ours = set(_ancestors())
    for agent in agents:
        if any(writer == agent.process.pid for writer in (each.pid for each in agent.workers)):
            raise ConfigError(
                f"the job with {location} has no agent of fastckpt-run: process {agent.process.pid} keeps its memory "
                "itself, and nothing of ours starts it again. Launch it with fastckpt-run"
            )
        inside = {agent.process.pid, *(worker.pid for worker in agent.workers)} & ours
        if inside:
            raise ConfigError(f"this command runs within the job itself (process {min(inside)}): run it in a shell")


def _ancestors() -> Iterator[int]:
    """This process, its parent and all above."""
    place = Path("/proc/self")
    while fields := stat_of(place):
        yield int(place.resolve().name)
        place = Path(f"/proc/{fields[1]}")


def _why_none(location: str, shm_dir: str, events: JobEvents) -> str:
    """The reason why there is no job, in words, with a remedy."""
    held = [entry for entry in _census(shm_dir) if entry.directory == location and entry.state is ArenaState.IN_USE]
    if held:
        who = held[0].owner or "a process that did not sign"
        return f"{location} is in use by {who}, which cannot be seen from here: run this in its container"
    for launch in events.launches():
        begin = last(launch, "job_started")
        if not begin:
            continue
        if how := ending(launch):
            return f"no job runs with {location}: the last one has ended ({how}); start it again"
        return _of_log(location, begin, shm_dir)
    others = sorted({entry.uid for entry in _census(shm_dir) if entry.state is ArenaState.FOREIGN})
    hint = f"; memory under {shm_dir} is also of {', '.join(map(_name, others))}" if others else ""
    return (
        f"no job of this user runs on {socket.gethostname()} with {location}{hint}. Give the checkpoint directory of "
        "a job of fastckpt-run; if that has another --fast-shm-dir, set FASTCKPT_SHM_DIR"
    )


def _of_log(location: str, begin: Event, shm_dir: str) -> str:
    """The same of a launch that has recorded its begin and no end."""
    host, pid = text(begin, "host"), whole(begin, "pid", 0)
    if host != socket.gethostname():
        return f"the job with {location} runs on {host}: run this there"
    with contextlib.suppress(OSError):
        uid = Path(f"/proc/{pid}").stat().st_uid
        if uid != Path("/proc/self").stat().st_uid and text(begin, "boot") == boot_id():
            return f"the job with {location} (process {pid}) belongs to {_name(uid)}: only that user may kill it"
    if stat_of(Path(f"/proc/{pid}"))[:1] not in ([], ["Z"], ["X"]) and text(begin, "boot") == boot_id():
        return (
            f"no job with {location} has memory under {shm_dir}; process {pid} may be one that began just now, or has "
            "another --fast-shm-dir: set FASTCKPT_SHM_DIR"
        )
    return f"no job runs with {location}: the last one (process {pid}) was killed; start it again"


def _census(shm_dir: Path | str) -> list[ArenaEntry]:
    try:
        return census(Path(shm_dir))
    except OSError:  # there is no such place
        return []


def _name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
