"""The command `fastckpt`: what lies in a checkpoint directory, and in memory for it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from fastckpt.config import Settings
from fastckpt.errors import FastckptError
from fastckpt.format.ids import SaveId
from fastckpt.memory import slots
from fastckpt.memory.arena import arena_path
from fastckpt.storage.directory import CheckpointDirectory


class Row(NamedTuple):
    """A checkpoint in one tier."""

    id: SaveId
    tier: str
    size: int
    age: float
    path: Path


@click.group()
@click.version_option(package_name="fastckpt")
def main() -> None:
    """Look at checkpoints."""


@main.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
def ls(directory: Path) -> None:
    """List the checkpoints of DIRECTORY, in memory and on storage, newest first; then what is damaged."""
    directory = directory.resolve()
    try:
        scan = CheckpointDirectory(directory).scan()
    except FastckptError as error:
        raise click.ClickException(str(error)) from error
    now = time.time()
    stored = [Row(s.id, "storage", s.manifest.size, now - s.manifest.time, s.path) for s in scan.whole]
    rows = sorted([*_in_memory(directory, now), *stored], reverse=True)
    click.echo(f"{'STEP':>8} {'HISTORY':>7} {'TIER':8} {'SIZE':>10} {'AGE':>8}  PATH")
    for row in rows:
        size, age = f"{row.size / 1e6:.1f} MB", f"{row.age:.0f} s"
        click.echo(f"{row.id.step:>8} {row.id.history:>7} {row.tier:8} {size:>10} {age:>8}  {row.path}")
    for path, why in scan.damaged:
        click.echo(f"damaged: {path}: {why}")


def _in_memory(directory: Path, now: float) -> Iterator[Row]:
    arena = arena_path(Settings.from_environment().shm_dir, str(directory), 0)
    for slot in sorted(arena.glob("slot-*")):
        records = slots.read(slot)
        if records.committed is not None:
            age = now - max(path.stat().st_mtime for path in slot.glob(".done-*"))
            yield Row(records.committed, "memory", sum(records.files.values()), age, slot)
