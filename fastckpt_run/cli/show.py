"""`fastckpt show`: the contents of a checkpoint, without loading it."""

from typing import Any

import click

from fastckpt._core.byte_sizes import decimal
from fastckpt._core.config import Settings
from fastckpt._core.inspect.checkpoint_files import find
from fastckpt._core.inspect.inventory import InventoryFile
from fastckpt._core.inspect.pickled import Tensor
from fastckpt._core.inspect.tree import Group, Tree, TreeEntry, read_tree, stored_bytes
from fastckpt._core.storage.reading import open_file
from fastckpt_run.cli.output import CommandOutput, Screen, answering, describe, number, shortened


@click.command()
@click.argument("checkpoint", metavar="DIR[@STEP]")
@click.option("--file", "names", multiple=True, metavar="NAME", help="Show this file only, such as model.pt.")
@click.option("--depth", type=click.IntRange(min=1), metavar="N", help="Levels of the tree to show.")
@answering
def show(checkpoint: str, names: tuple[str, ...], depth: int | None) -> CommandOutput:
    """Show the tensors and values in a checkpoint: names, types, shapes.

    It reads descriptions, no tensors, and runs no code of a file. The argument may also be a directory of .pt files,
    or one file. All shards of a DCP checkpoint are one file: .metadata.
    """
    source = find(checkpoint, Settings.from_environment().arenas)
    files = {name: source.file(name) for name in names or source.files}
    trees = {name: _read(file) for name, file in files.items()}
    # A job may reuse the slot while it is read: then the answer is of two checkpoints, and is refused.
    source.check_unchanged()
    sizes = {name: file.whole_size for name, file in files.items()}
    document = {
        "checkpoint": describe(source.item) if source.item else None,
        "files": [
            {
                "name": name,
                "path": str(files[name].path),
                "size": sizes[name],
                "tensors": _count(tree),
                "bytes": stored_bytes(tree),
                "entries": [_to_json(entry) for entry in tree if _is_within(entry, depth)],
            }
            for name, tree in trees.items()
        ],
    }

    def print_trees(screen: Screen) -> None:
        for i, (name, tree) in enumerate(trees.items()):
            if i:
                screen.line("")
            tensors = f"{_count(tree)} tensors of {decimal(stored_bytes(tree))}"
            screen.line(f"{files[name].path}: {decimal(sizes[name])}, {tensors}")
            rows = [_row(entry, tree) for entry in tree if entry.keys and _is_within(entry, depth)]
            screen.table(["NAME", "TYPE", "SHAPE", ">BYTES", "VALUE"], rows)

    return CommandOutput(document, print_trees)


def _read(file: InventoryFile) -> Tree:
    if file.has_parts:
        from fastckpt._core.inspect.values import StateFile  # imports torch, which the others need not

        with StateFile(file) as state:
            return state.tree
    with open_file(file.path, file.size) as opened:
        return read_tree(opened, str(file.path))


def _count(tree: Tree) -> int:
    return sum(isinstance(entry.value, Tensor) for entry in tree)


def _is_within(entry: TreeEntry, depth: int | None) -> bool:
    return depth is None or len(entry.keys) <= depth


def _to_json(entry: TreeEntry) -> dict[str, Any]:
    value = entry.value
    tensor = value if isinstance(value, Tensor) else None
    group = isinstance(value, Group)
    return {
        "name": entry.name,
        "kind": "tensor" if tensor else "group" if group else "value",
        "type": entry.type,
        "shape": list(tensor.shape) if tensor else None,
        "bytes": tensor.size if tensor else None,
        "storage": tensor.storage.key if tensor and tensor.storage else None,
        "value": None if tensor or group else _value(value),
    }


def _value(value: Any) -> Any:
    if isinstance(value, float):
        return number(value)
    return value if value is None or type(value) in (str, int, bool) else repr(value)


def _row(entry: TreeEntry, tree: Tree) -> list[str]:
    indented = "  " * (len(entry.keys) - 1) + (
        entry.keys[-1] if isinstance(entry.keys[-1], str) else repr(entry.keys[-1])
    )
    match entry.value:
        case Tensor() as tensor:
            return [indented, tensor.dtype, "x".join(map(str, tensor.shape)) or "scalar", decimal(tensor.size), ""]
        case Group() as group:
            return [indented, f"{group.kind} of {group.count}", "", "", ""]
    return [indented, entry.type, "", "", shortened(repr(entry.value))]
