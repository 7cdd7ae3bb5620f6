"""Checkpoints of a later version: refused by name and left as they are, whichever ask for them."""

import json
from pathlib import Path

import pytest
import torch

from fastckpt._core.format.manifest import NAME, SCHEMA, Manifest, _digest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.ddp import StorageType
from fastckpt.errors import BadCheckpoint, FastckptError, NewerFormat
from fastckpt_run.cli import main
from tests.e2e.ddp.conftest import Ranks


def rewritten(place: Path, schema: int, *, is_sound: bool = True) -> None:
    body = json.loads((place / NAME).read_text()) | {"fastckpt": schema, "new": True}
    digest = body.pop("digest")
    (place / NAME).write_text(json.dumps(body | {"digest": _digest(body) if is_sound else digest}))


@pytest.fixture(autouse=True)
def two_steps(ranks: Ranks, directory: Path) -> None:
    """The directory has steps 1 and 2, and no job uses it."""
    (one,) = ranks.start()
    for step in (1, 2):
        one.save_checkpoint(step, {"step": step, "weight": torch.full((4,), step)}, storage_type=StorageType.DISK)
        one.wait_latest_checkpoint(60)
    ranks.end()


def test_the_newest_checkpoint_of_a_later_format_is_refused_and_neither_quarantined_nor_passed_over(
    ranks: Ranks, directory: Path, capsys: pytest.CaptureFixture[str]
):
    rewritten(directory / "checkpoint-2", SCHEMA + 1)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and "checkpoint-" in str(path)}
    with pytest.raises(FastckptError, match=rf"checkpoint-2/{NAME}: format {SCHEMA + 1} of a later fastckpt"):
        (one,) = ranks.start()
        one.load_checkpoint()
    ranks.end()
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(SystemExit) as ended:
        main(["which", str(directory)])
    assert ended.value.code == 2 and "of a later fastckpt" in capsys.readouterr().err


def test_an_older_checkpoint_of_a_later_format_is_passed_over(ranks: Ranks, directory: Path):
    rewritten(directory / "checkpoint-1", SCHEMA + 1)
    (one,) = ranks.start()
    assert one.load_checkpoint()["step"] == 2
    assert [stored.id.step for stored in CheckpointDirectory(directory).checkpoints()] == [2]


def test_a_later_format_that_the_digest_does_not_confirm_is_damage(ranks: Ranks, directory: Path):
    rewritten(directory / "checkpoint-2", SCHEMA + 1, is_sound=False)
    (one,) = ranks.start()
    assert one.load_checkpoint()["step"] == 1
    assert not (directory / "checkpoint-2").exists()


@pytest.mark.parametrize(("schema", "error"), [(SCHEMA + 1, NewerFormat), (SCHEMA - 1, BadCheckpoint)])
def test_manifests_of_other_formats(directory: Path, schema: int, error: type[Exception]):
    rewritten(directory / "checkpoint-2", schema)
    with pytest.raises(error):
        Manifest.from_json((directory / "checkpoint-2" / NAME).read_text())
