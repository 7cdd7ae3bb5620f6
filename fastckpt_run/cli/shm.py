"""`fastckpt shm`: the shared memory of jobs on this host, and the removal of unowned arenas."""

from pathlib import Path
from typing import Any

import click

from fastckpt._core.byte_sizes import decimal
from fastckpt._core.config import Settings
from fastckpt._core.inspect.work_progress import WorkObserver
from fastckpt._core.memory.census import ArenaEntry, ArenaState, census
from fastckpt._core.memory.census import clean as remove
from fastckpt.errors import ConfigError, FastckptError
from fastckpt_run.cli.output import FINDING, CommandOutput, Screen, answering, known
from fastckpt_run.cli.progress import observed


@click.group()
def shm() -> None:
    """List or remove the memory of jobs on this host."""


@shm.command()
@answering
def ls() -> CommandOutput:
    """List the arenas of this host, and their owners."""
    entries = _census()
    document = {"arenas": [_to_json(entry) for entry in entries]}
    return CommandOutput(document, lambda screen: _table(screen, entries, {}))


@shm.command()
@click.argument("arenas", nargs=-1, metavar="[ARENA]...")
@click.option("--force", is_flag=True, help="Also those with a complete checkpoint, which may be the only copy.")
@click.option("--yes", is_flag=True, help="Remove.")
@answering
@observed
def clean(arenas: tuple[str, ...], force: bool, yes: bool, observer: WorkObserver) -> CommandOutput:
    """Remove arenas without an owner, or the named ones of these; without --yes, only list them.

    Arenas of a live job or another user stay. So do those with a complete checkpoint, which the next launch would
    resume, without --force. Exit code 1: one could not be removed.
    """
    entries = _chosen(_census(), arenas)
    outcomes = {}
    observer.begin("remove", sum(entry.size for entry in entries))
    for entry in entries:
        outcomes[entry.path] = _remove(entry, force=force, yes=yes)
        observer.advance(entry.size)
    document = {
        "done": yes,
        "arenas": [
            {**_to_json(entry), "removed": outcomes[entry.path] == "removed", "why": outcomes[entry.path]}
            for entry in entries
        ],
    }
    failed = any(outcome.startswith("failed") for outcome in outcomes.values())
    return CommandOutput(document, lambda screen: _table(screen, entries, outcomes), FINDING if failed else 0)


def _census() -> list[ArenaEntry]:
    shm_dir = Settings.from_environment().arenas
    try:
        return census(Path(shm_dir))
    except OSError as error:
        raise ConfigError(
            f"{shm_dir} cannot be listed: {error.strerror}; name another tmpfs in FASTCKPT_SHM_DIR"
        ) from error


def _chosen(entries: list[ArenaEntry], names: tuple[str, ...]) -> list[ArenaEntry]:
    known_names = {name: entry for entry in entries for name in (str(entry.path), entry.path.name)}
    unknown = [name for name in names if name not in known_names]
    if unknown:
        raise ConfigError(f"there is no arena {', '.join(unknown)}; fastckpt shm ls lists them")
    return [known_names[name] for name in names] if names else entries


def _remove(entry: ArenaEntry, *, force: bool, yes: bool) -> str:
    """Remove an arena, unless this is a dry run; return the outcome in words."""
    if entry.state in (ArenaState.IN_USE, ArenaState.FOREIGN):
        return f"kept: {entry.state}"
    # Memory of an earlier boot is gone, whatever a file system that is no tmpfs still shows.
    forced = force or entry.state is ArenaState.OLD_BOOT
    if entry.newest is not None and not forced:
        return f"kept: it holds {entry.newest}, which may be nowhere else; --force removes it"
    if not yes:
        return "to be removed"
    try:
        remove(entry, force=forced)
    except (FastckptError, OSError) as error:
        return f"failed: {error}"
    return "removed"


def _table(screen: Screen, entries: list[ArenaEntry], outcomes: dict[Path, str]) -> None:
    columns = ["STATE", ">SIZE", "NEWEST", "OWNER", "DIRECTORY", "PATH"]
    rows = list[list[str]]()
    for entry in entries:
        owner = f"{entry.owner.pid} on {entry.owner.host}" if entry.owner else "?"
        newest = known(entry.newest) if entry.newest else "nothing"
        rows.append([str(entry.state), decimal(entry.size), newest, owner, entry.directory or "?", str(entry.path)])
    if outcomes:
        columns = [*columns, "WHAT"]
        rows = [[*row, outcomes[entry.path]] for row, entry in zip(rows, entries, strict=True)]
    screen.table(columns, rows)


def _to_json(entry: ArenaEntry) -> dict[str, Any]:
    owner, newest = entry.owner, entry.newest
    return {
        "path": str(entry.path),
        "state": str(entry.state),
        "kind": "arena" if entry.is_arena else "telemetry",
        "uid": entry.uid,
        "size": entry.size,
        "directory": entry.directory,
        "pid": owner.pid if owner else None,
        "host": owner.host if owner else None,
        "started": owner.started if owner else None,
        "writers": [writer.pid for writer in entry.writers],
        "newest": {"step": newest.step, "history": newest.history} if newest else None,
        "slots": {name: {"step": s.step, "history": s.history} if s else None for name, s in entry.slots.items()},
    }
