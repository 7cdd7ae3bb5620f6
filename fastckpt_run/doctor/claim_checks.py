"""Checks of the holders of a checkpoint directory and of this host's memory, and of a launch's reaction to them."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from fastckpt._core.byte_sizes import decimal
from fastckpt._core.config import Settings
from fastckpt._core.memory.arena import arena_path
from fastckpt._core.memory.census import ArenaEntry, ArenaState, census
from fastckpt._core.memory.presence import signed
from fastckpt._core.memory.processes import Process
from fastckpt._core.saver.arena_location import left_elsewhere
from fastckpt._core.saver.persistence.predecessor import PATIENCE, STALE, has_died
from fastckpt._core.storage.store import as_path, is_url, normalised, open_store
from fastckpt_run.doctor.diagnosis import Diagnosis, Subject, ok, problem, warning
from fastckpt_run.formatting import count

END_IT = "End that job, or give this one another directory; --fast-take-over takes this one away from it"


def memory_of_others(subject: Subject) -> Iterator[Diagnosis]:
    """Memory of this host that other directories have: of live jobs, left behind, of other users."""
    own = _location(subject)
    arenas = [entry for entry in census(Path(subject.job.arenas)) if entry.is_arena]
    others = [entry for entry in arenas if not own or entry.directory != own]
    name = "memory of others"
    left = [entry for entry in others if entry.state is ArenaState.LEFT_BEHIND]
    swept = [entry for entry in others if entry.state is ArenaState.OLD_BOOT or (entry in left and entry.path.suffix)]
    used = [entry for entry in others if entry.state is ArenaState.IN_USE]
    foreign = [entry for entry in others if entry.state is ArenaState.FOREIGN]
    yield ok(name, f"{_sum(used)} of live jobs of this user, {len(foreign)} of other users")
    if kept := [entry for entry in left if entry not in swept]:
        where = ", ".join(sorted({entry.directory or str(entry.path) for entry in kept})[:3])
        text = f"{_sum(kept)} left behind by dead jobs: {where}"
        yield warning(
            name, text, "A launch with that directory adopts it; else remove it: fastckpt shm clean --force --yes"
        )
    if swept:
        yield ok(name, f"{_sum(swept)} of an earlier boot, or half removed: the next launch removes it")


def arena_of_directory(subject: Subject) -> Iterator[Diagnosis]:
    """The memory of a directory on this host: its owner, and whether a launch adopts it."""
    location, settings = _location(subject), subject.job
    expected = arena_path(settings.arenas, location, 0)
    entries = [entry for entry in census(Path(settings.arenas)) if location in (entry.directory,)]
    if not entries and os.path.lexists(expected):
        status = expected.lstat()
        text = f"{expected} is not a private directory of this user (owner {status.st_uid}): a launch is refused"
        yield problem("memory of the directory", text, "Remove it, or choose another tmpfs with --fast-shm-dir")
    elif not entries:
        yield ok("memory of the directory", "none on this host: a launch makes it")
    for entry in entries:
        yield _of_arena(entry, location, settings)
        yield from _left_writers(entry)
        if entry.state is ArenaState.LEFT_BEHIND:
            for text in left_elsewhere(settings, entry.path, location, entry.newest):
                yield warning("memory elsewhere", text, "Launch once with that place, or remove it")


def history(subject: Subject) -> Iterator[Diagnosis]:
    """The job that saved to a directory last, and whether a launch has to wait for it."""
    if not is_url(subject.directory) and not Path(as_path(subject.directory)).is_dir():
        yield ok("history", "none: nobody has saved there")
        return
    with closing(open_store(_location(subject))) as store:
        number = store.histories.newest(fresh=False)
        record = store.histories.read(number) if number else None
    if record is None:
        yield ok("history", "none: nobody has saved there")
        return
    process = Process.from_record(dict(record.holder)) or "a process that did not sign"
    whom = f"{process} (history {record.history}, since {record.since})"
    if record.closed:
        yield ok("history", f"closed in order by {whom}")
    elif has_died(record):
        yield ok("history", f"held by {whom}, which is dead: a launch opens the next one at once")
    elif subject.job.take_over:
        yield warning(
            "history", f"a launch takes the directory over from {whom}, without waiting", "Drop --fast-take-over"
        )
    else:
        waits = (
            f"a launch waits until it is closed, or has not been renewed for {STALE:g} s, and ends after {PATIENCE:g} s"
        )
        yield warning("history", f"held by {whom}, which lives as far as is known: {waits}", END_IT)


def _of_arena(entry: ArenaEntry, location: str, settings: Settings) -> Diagnosis:
    name, holds = "memory of the directory", f"{entry.newest} whole" if entry.newest else "nothing whole"
    owner = entry.owner or "a process that did not sign"
    if entry.state is ArenaState.IN_USE:
        then = (
            "a launch with --fast-take-over ends it" if settings.take_over else f"a launch waits {PATIENCE:g} s for it"
        )
        return warning(name, f"{entry.path} is in use by {owner}, and holds {holds}: {then}", END_IT)
    if entry.state is ArenaState.OLD_BOOT:
        return ok(name, f"{entry.path} is of an earlier boot: a launch removes it")
    with closing(open_store(location)) as store:
        is_own = entry.claim.is_of(*store.identity())
    left = f"{entry.path} was left behind by {owner}, and holds {holds}"
    if not is_own:
        text = f"{left}, of a directory of this name that was removed since: a launch gives it up"
        return warning(name, text, "Save it first if you need it: fastckpt export")
    return ok(name, f"{left}: a launch adopts it")


def _left_writers(entry: ArenaEntry) -> Iterator[Diagnosis]:
    """Workers that outlive their agent, and processes that outlive those."""
    if entry.state is not ArenaState.LEFT_BEHIND:
        return
    left = sorted({each.pid for _, process in signed(entry.path) for each in process.left()})
    pids = sorted({process.pid for process in entry.writers} | {*left})
    if pids:
        text = f"processes {', '.join(map(str, pids))} are left of a dead job: a launch kills them before it adopts"
        yield warning("left-over processes", text, f"End them yourself if they are to end in order: kill {pids[0]}")


def _location(subject: Subject) -> str:
    return normalised(subject.directory) if subject.directory else ""


def _sum(entries: list[ArenaEntry]) -> str:
    return f"{count(len(entries), 'arena')} with {decimal(sum(entry.size for entry in entries))}"
