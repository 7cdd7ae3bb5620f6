"""Finds the files of the checkpoint that a user names, to be read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fastckpt._core.format.manifest import METADATA, MODEL
from fastckpt._core.inspect.address import Address, parse
from fastckpt._core.inspect.inventory import Inventory, InventoryFile, InventoryItem, take
from fastckpt._core.storage.store import is_url
from fastckpt.errors import BadCheckpoint, ConfigError

PART = ".distcp"
"""The ending of files with the contents that a ``.metadata`` describes."""


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint to read.

    Attributes:
        name: Name that the user gave.
        files: Its files, by name.
        item: Checkpoint as found in the directory; None for a file, or a directory of files.
        is_file: True if the user named one file.
        unchanged: Returns whether it is still as found.
    """

    name: str
    files: Mapping[str, InventoryFile]
    item: InventoryItem | None = None
    is_file: bool = False
    unchanged: Callable[[], bool] = lambda: True

    def check_unchanged(self) -> None:
        """Raise BadCheckpoint if bytes that were read meanwhile may be of two saves."""
        if not self.unchanged():
            raise BadCheckpoint(
                f"{self.name} changed while it was read: its job took its slot for a newer save, or deleted it. Try "
                f"again, or name one that it keeps."
            )

    def file(self, name: str) -> InventoryFile:
        """A file by its name; raises ConfigError if there is none."""
        if name not in self.files:
            raise ConfigError(f"{self.name} has no file {name!r}; it has {', '.join(sorted(self.files))}")
        return self.files[name]


def find(text: str, shm_dir: str) -> CheckpointFiles:
    """Find the file, the directory of files, or the checkpoint that ``text`` names.

    Of a step that is in memory and on storage, the one on storage is taken, because a job may reuse memory. A
    checkpoint of torch.distributed.checkpoint is one file, its ``.metadata``, with parts.

    Raises:
        ConfigError: There is no such thing.
        BadCheckpoint: It is damaged.
    """
    source = _find(text, shm_dir)
    if METADATA not in source.files:
        return source
    parts = {name: file for name, file in source.files.items() if name.endswith(PART)}
    own = {name: file for name, file in source.files.items() if name not in parts}
    return replace(source, files=own | {METADATA: replace(own[METADATA], parts=parts)})


def _find(text: str, shm_dir: str) -> CheckpointFiles:
    address = parse(text)
    path = Path(address.location)
    if not address.explicit and not is_url(address.location):
        if path.is_file() and path.name == METADATA:
            path = path.parent
        elif path.is_file():
            return CheckpointFiles(text, {path.name: InventoryFile(path, path.stat().st_size)}, is_file=True)
        if files := _plain(path):
            return CheckpointFiles(text, files)
    item = choose(take(address.location, shm_dir), address)
    return CheckpointFiles(text, item.files, item, unchanged=item.unchanged)


def choose(inventory: Inventory, address: Address) -> InventoryItem:
    """The newest whole checkpoint that an address fits."""
    fitting = [item for item in inventory.items if fits(item, address)]
    whole = [item for item in fitting if item.state == "whole"]
    if whole:
        newest = max(item.id or () for item in whole)
        return max((item for item in whole if item.id == newest), key=lambda item: item.tier)  # storage before memory
    if fitting:
        raise BadCheckpoint(f"{address} is not whole: {'; '.join(f'{item.state}: {item.why}' for item in fitting)}")
    known = ", ".join(str(step) for step in sorted({item.step or 0 for item in inventory.whole}, reverse=True)[:10])
    raise ConfigError(
        f"there is no {address}; {inventory.location} has {f'steps {known}' if known else 'no checkpoint'}"
    )


def fits(item: InventoryItem, address: Address) -> bool:
    """Return whether an address may mean a checkpoint."""
    return (
        address.step in (None, item.step)
        and address.history in (None, item.history)
        and address.tier in ("", item.tier)
    )


def _plain(path: Path) -> dict[str, InventoryFile]:
    """The files of a directory that is itself a checkpoint, or a slot; {} for a checkpoint directory."""
    if (path / ".fastckpt").is_dir() or not path.is_dir():
        return {}
    names = [name for name in (MODEL, METADATA) if (path / name).is_file()]
    names += sorted(found.name for found in path.glob(f"*{PART}")) if METADATA in names else []
    names += sorted(found.name for found in path.glob("*.pt") if found.name != MODEL and found.is_file())
    return {name: InventoryFile(path / name, (path / name).stat().st_size) for name in names}
