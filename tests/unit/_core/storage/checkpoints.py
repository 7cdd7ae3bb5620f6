"""Small checkpoints to publish, and what must hold of a directory of them."""

import os
from pathlib import Path
from typing import Any

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import JSON
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.local.scan import Scan
from fastckpt._core.storage.share import Share
from fastckpt._core.storage.store import Pending, Store


def images(path: Path, id: SaveId) -> dict[str, Path]:
    """The files of one state, unlike those of any other; their sizes are the same for all."""
    return _written(path, {"model.pt": (b"%d.%d model." % id) * 5000, "rank_0.pt": b"%d.%d rank" % id, "empty": b""})


def _written(path: Path, contents: dict[str, bytes]) -> dict[str, Path]:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (path / name).write_bytes(content)
    return {name: path / name for name in contents}


def publish(
    directory: CheckpointDirectory, id: SaveId, target: str = "", parent: SaveId | None = None, **more: JSON
) -> None:
    source = directory.path.parent / f"image-{id.history}-{id.step}"
    details: dict[str, JSON] = {"omp_num_threads": 1, **more}
    directory.publish(PublishRequest(id, images(source, id), target=target, parent=parent, details=details))


def images_of_node(path: Path, id: SaveId, node: int) -> dict[str, Path]:
    """What one of several nodes has of a state; the model is the first one's."""
    if node:
        return _written(path, {f"rank_{node}.pt": b"%d.%d rank %d" % (*id, node), f"empty-{node}": b""})
    return _written(path, {"model.pt": (b"%d.%d model." % id) * 5000, "rank_0.pt": b"%d.%d rank" % id})


def contribute(folder: Path, store: Store, share: Share, id: SaveId, **request: Any) -> Pending:
    """Write a node's part, as in a job with one rank on each node; its images are made in the folder."""
    images = images_of_node(folder / f"image-{id.history}-{id.step}-of-{share.node}", id, share.node)
    details = {"attempt": share.attempt, "omp_num_threads": 1}
    more = {"images": images, "world_size": share.nodes, "details": details} | request
    return store.contribute(PublishRequest(id, **more), share)


def ids(store: Store) -> list[SaveId]:
    return [stored.id for stored in store.checkpoints()]


def assert_sound(directory: CheckpointDirectory, scan: Scan | None = None) -> list[SaveId]:
    """Every checkpoint that counts is what was saved under its id; returns the ids, newest first."""
    scan = scan or directory.scan()
    for stored in scan.whole:
        directory.verify(stored)
        assert stored.path_of("model.pt").read_bytes().startswith(b"%d.%d model." % stored.id)
        assert stored.path_of("rank_0.pt").read_bytes() == b"%d.%d rank" % stored.id
        names = {entry.name for entry in stored.manifest.files}
        assert {f"rank_{rank}.pt" for rank in range(stored.manifest.world_size)} <= names or "empty" in names
    assert scan.damaged == [], scan.damaged
    return [stored.id for stored in scan.whole]


def assert_named(scan: Scan, *, is_over: bool = True) -> None:
    """The path that was named for the newest checkpoint has its model, or a whole one if its writer was killed."""
    for stored in scan.whole[:1]:
        if is_over and stored.target:
            assert stored.target.is_file()
            assert stored.target.read_bytes() == stored.path_of("model.pt").read_bytes()
        elif stored.target and stored.target.exists():
            found = stored.target.read_bytes()
            assert found and found == found[: len(found) // 5000] * 5000


def assert_clean(directory: CheckpointDirectory) -> None:
    """No writer left anything behind; what a killed one left outside goes with the next save there."""
    left = [Path(at) / name for at, dirs, files in os.walk(directory.path) for name in dirs + files]
    kinds = ("tmp-", "retired-", "dropped-", "deleted-", "parts-", ".fastckpt-")
    left = [path for path in left if path.name.startswith(kinds)]
    assert left == [], left
