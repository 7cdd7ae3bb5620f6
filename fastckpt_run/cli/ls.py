"""`fastckpt ls`: the checkpoints of a directory in every tier."""

import time
from typing import Any

import click

from fastckpt._core.byte_sizes import decimal
from fastckpt._core.config import Settings
from fastckpt._core.inspect.inventory import Inventory, InventoryItem, take
from fastckpt._core.storage.local.foreign_files import DCP, FLASH, TORCH
from fastckpt_run.cli.output import REMOTE, CommandOutput, Screen, age, answering, describe, known

_MOST = 10
"""Checkpoints of other libraries that are named, at most."""


@click.command()
@click.argument("directory", metavar="DIR")
@REMOTE
@answering
def ls(directory: str, remote: str) -> CommandOutput:
    """List the checkpoints of DIR, in memory and on storage."""
    inventory = take(directory, Settings.from_environment().arenas, remote)
    document: dict[str, Any] = {
        "directory": inventory.location,
        "jobs": jobs(inventory),
        "checkpoints": [describe(item) for item in inventory.items],
    }

    def show(screen: Screen) -> None:
        rows = [_row(item) for item in inventory.items]
        screen.table([">STEP", ">HISTORY", "TIER", ">SIZE", ">AGE", ">WORLD", "STATE", "PATH"], rows)
        for line in () if inventory.items else none_of_ours(inventory):
            screen.line(line)
        for item in inventory.items:
            if item.why:
                screen.line(f"{item.state}: {item.path}: {item.why}")
        for job in document["jobs"]:
            screen.line(in_words(job))

    return CommandOutput(document, show)


def jobs(inventory: Inventory) -> list[dict[str, Any]]:
    """The live jobs of this host that use a directory, as JSON."""
    owners = [(arena.path, arena.owner) for arena in inventory.in_use]
    return [
        {
            "pid": owner.pid if owner else None,
            "host": owner.host if owner else None,
            "started": owner.started if owner else None,
            "arena": str(path),
        }
        for path, owner in owners
    ]


def none_of_ours(inventory: Inventory) -> list[str]:
    """A description, for people, of a directory without checkpoints of ours."""
    lines = ["no checkpoint of fastckpt is here"]
    for path, writer in inventory.foreign[:_MOST]:
        readers = ": show, diff and export read it" if writer in (DCP, TORCH, FLASH) else ""
        lines.append(f"{path} seems to be of {writer}{readers}")
    return lines


def in_words(job: dict[str, Any]) -> str:
    """A job, for people."""
    return f"in use by process {job['pid']} on {job['host']}, started {job['started']} (memory: {job['arena']})"


def _row(item: InventoryItem) -> list[str]:
    past = None if item.time is None else max(0.0, time.time() - item.time)
    known_of = [known(item.step), known(item.history), item.tier, decimal(item.size), age(past), known(item.world)]
    return [*known_of, item.state, str(item.path)]
