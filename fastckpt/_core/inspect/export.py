"""Exports the state of a checkpoint into one file that other tools read."""

import errno
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastckpt._core.arguments import abbreviated
from fastckpt._core.format.safetensors import Tensors
from fastckpt._core.inspect.exported_file import ExportedFile, write_safetensors, write_torch
from fastckpt._core.inspect.inventory import InventoryFile
from fastckpt._core.inspect.values import StateFile, load
from fastckpt._core.inspect.work_progress import UNOBSERVED, WorkObserver, share_of
from fastckpt._core.io.durable import explained, sync_directory
from fastckpt._core.storage.reading import digest_of, open_file
from fastckpt._core.torch_private.tensors import storage_key
from fastckpt.errors import BadCheckpoint, ConfigError

VALUES = "fastckpt.values"
"""The key in a safetensors file's metadata of all values that are no tensors: a JSON object, by name."""
PART = 16 * 2**20
"""Bytes that are downloaded at once."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""The errors of file systems without hard links."""
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class ExportOrder:
    """The options of an export.

    Attributes:
        format: "safetensors" or "torch".
        only: Names, joined by dots, of the part of the state to take, such as ``model``; empty for all.
        force: True if a file that exists may be replaced.
    """

    format: str
    only: str = ""
    force: bool = False


def export_file(
    source: InventoryFile,
    out: Path,
    order: ExportOrder,
    check: Callable[[], None],
    observer: WorkObserver = UNOBSERVED,
) -> None:
    """Write the state in a torch.save file to ``out``, durably; ``out`` is there whole or not at all.

    The source is compared with its digest, then mapped, not read into memory; one at a URL is downloaded beside ``out``
    first. As safetensors, names are joined by dots, and numbers and texts become metadata.
    Tensors that are the same one are written once; the metadata has the other names, as
    ``safetensors.torch.save_model`` does it.

    Args:
        source: The file, such as ``model.pt`` of a checkpoint.
        out: The new file.
        order: Request of the user.
        check: Raises if the source has changed since it was found; called before ``out`` gets its name.
        observer: Follows the bytes that are compared, downloaded or put together, and written.

    Raises:
        ConfigError: ``out`` exists; or the state cannot be written in this format, with the names and the remedy.
        BadCheckpoint: The source cannot be loaded.
        PersistError: Storage refused.
    """
    if os.path.lexists(out) and not order.force:
        raise ConfigError(f"{out} exists; give another name, or --force to replace it")
    draft = out.with_name(f".fastckpt-export-{secrets.token_hex(6)}")
    with (
        explained(f"export {source.path}", out.parent),
        _at_hand(source, draft.with_suffix(".source"), observer) as path,
    ):
        state = _part(_gathered(source, observer) if source.has_parts else load(path, str(path)), order.only)
        try:
            _write(state, order.format, draft, observer)
            check()
            _name(draft, out, force=order.force)
        finally:
            draft.unlink(missing_ok=True)


@contextmanager
def _at_hand(source: InventoryFile, copy: Path, observer: WorkObserver) -> Iterator[Path]:
    """A local file with the verified bytes of the source, until the with block ends."""
    files = [file for file in (source, *source.parts.values()) if file.digest]
    observer.begin("verify", sum(file.size for file in files))
    for file in files:
        if (found := digest_of(file.path, file.size, observer.advance)) != file.digest:
            raise BadCheckpoint(f"{file.path} is damaged: its xxh3-128 is {found}; {file.digest} was saved")
    if isinstance(source.path, Path):
        yield source.path
        return
    try:
        observer.begin("download", source.size)
        with open_file(source.path, source.size) as remote, copy.open("xb") as local:
            while data := remote.read(PART):
                local.write(data)
                observer.advance(len(data))
        yield copy
    finally:
        copy.unlink(missing_ok=True)


def _name(draft: Path, out: Path, *, force: bool) -> None:
    if force:
        draft.replace(out)
    else:
        try:
            os.link(draft, out)  # unlike a rename, it never replaces
        except FileExistsError as error:
            raise ConfigError(f"{out} has come to exist meanwhile; give another name, or --force") from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            draft.rename(out)
    sync_directory(out.parent)


def _gathered(source: InventoryFile, observer: WorkObserver) -> Any:
    observer.begin("read", source.whole_size)
    with StateFile(source) as file, share_of(observer, source.whole_size) as advance:
        return file.gathered(advance)


def _write(state: Any, kind: str, draft: Path, observer: WorkObserver) -> None:
    flat = _flat(state) if kind == "safetensors" else None
    size = sum(tensor.nbytes for tensor in flat.tensors.values()) if flat else _stored_bytes(state)
    observer.begin("write", size)
    with share_of(observer, size) as advance, ExportedFile(draft, advance) as file:
        write_safetensors(flat, file) if flat else write_torch(state, file)
        file.sync()


def _part(state: Any, only: str) -> Any:
    for name in only.split(".") if only else []:
        if not isinstance(state, Mapping) or name not in state:
            known = ", ".join(map(str, state)) if isinstance(state, Mapping) else f"a {type(state).__name__}"
            raise ConfigError(f"the state has no {only!r}: where {name!r} was to be, there is {known[:300]}")
        state = state[name]
    return state


def _flat(state: Any) -> Tensors:
    """A state as safetensors holds it; raises ConfigError for one that it cannot hold."""
    leaves = _leaves(state)
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    values = {name: leaf for name, leaf in leaves.items() if name not in tensors}
    _refuse(tensors, values)
    kept, same = _without_twins(tensors)
    return Tensors(kept, {"format": "pt", **same, **({VALUES: json.dumps(values)} if values else {})})


def _stored_bytes(state: Any) -> int:
    """Bytes of the storages of a state, each once, as torch.save writes them."""
    sizes: dict[Any, int] = {}
    todo = [state]
    while todo:
        node = todo.pop()
        if isinstance(node, torch.Tensor) and _is_plain(node):
            storage = node.untyped_storage()
            sizes[storage_key(storage)] = storage.nbytes()
        elif isinstance(node, Mapping):
            todo.extend(node.values())
        elif isinstance(node, list | tuple):
            todo.extend(node)
    return sum(sizes.values())


def _leaves(state: Any) -> dict[str, Any]:
    """All that is no container, and empty containers, by names joined by dots."""
    found: dict[str, Any] = {}
    twice: list[str] = []

    def visit(name: str, node: Any) -> None:
        children = node.items() if isinstance(node, Mapping) else enumerate(node) if type(node) in (list, tuple) else ()
        if not (isinstance(node, Mapping) or type(node) in (list, tuple)) or not node:
            twice.extend([name] if name in found else [])
            found[name] = node
        for key, child in children:
            visit(f"{name}.{key}" if name else str(key), child)

    visit("", state)
    if twice:
        raise ConfigError(
            f"several parts of the state have the same name when joined by dots: {abbreviated(twice)}. Export a part "
            f"of it with --only, or all with --format torch."
        )
    return found


def _refuse(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
    odd = [name for name, tensor in tensors.items() if not _is_plain(tensor)]
    odd += [f"{name} ({type(value).__name__})" for name, value in values.items() if value and type(value) not in _PLAIN]
    if odd:
        raise ConfigError(
            f"safetensors holds plain tensors, numbers and texts only; these are none: {abbreviated(odd)}. Export a "
            f"part of the state with --only, such as --only model, or all with --format torch."
        )
    if not tensors:
        raise ConfigError("there are no tensors to export; --format torch takes any state")


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta and not tensor.is_nested


def _without_twins(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each tensor once, side by side in memory of its own; and the other names of those that had several."""
    kept: dict[str, torch.Tensor] = {}
    same: dict[str, str] = {}
    first: dict[Any, str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        views = (tensor.is_conj() if tensor.is_complex() else False, tensor.is_neg())
        key = storage_key(storage)
        view = (key, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, views)
        if view in first:
            same[name] = first[view]
            continue
        first[view] = name
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        kept[name] = plain.clone() if key in storages and plain.data_ptr() == tensor.data_ptr() else plain
        storages.add(key)
    return kept, same
