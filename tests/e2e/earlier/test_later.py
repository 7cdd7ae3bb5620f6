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


def test_a_checkpoint_of_a_later_format_is_refused_or_passed_over_and_left_and_any_other_one_is_damaged(
    ranks: Ranks, directory: Path, capsys: pytest.CaptureFixture[str]
):
    def loaded() -> int:
        (one,) = ranks.start()
        step = int(one.load_checkpoint()["step"])
        ranks.end()
        return step

    (one,) = ranks.start()
    for step in (1, 2, 3):
        one.save_checkpoint(step, {"step": step, "weight": torch.full((4,), step)}, storage_type=StorageType.DISK)
        one.wait_latest_checkpoint(60)
    ranks.end()
    rewritten(directory / "checkpoint-1", SCHEMA + 1)
    assert loaded() == 3, "it is older"
    assert [stored.id.step for stored in CheckpointDirectory(directory).checkpoints()] == [3, 2]
    whole = (directory / "checkpoint-3" / NAME).read_text()
    rewritten(directory / "checkpoint-3", SCHEMA + 1)
    before = {path: path.read_bytes() for path in directory.glob("checkpoint-*/*")}
    with pytest.raises(FastckptError, match=rf"checkpoint-3/{NAME}: format {SCHEMA + 1} of a later fastckpt"):
        loaded()
    ranks.end()
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(SystemExit) as ended:
        main(["which", str(directory)])
    assert ended.value.code == 2 and "of a later fastckpt" in capsys.readouterr().err
    for schema, error in ((SCHEMA + 1, NewerFormat), (SCHEMA - 1, BadCheckpoint)):
        (directory / "checkpoint-3" / NAME).write_text(whole)
        rewritten(directory / "checkpoint-3", schema)
        with pytest.raises(error):
            Manifest.from_json((directory / "checkpoint-3" / NAME).read_text())
    rewritten(directory / "checkpoint-3", SCHEMA + 1, is_sound=False)
    assert loaded() == 2 and not (directory / "checkpoint-3").exists(), "its digest does not confirm that it is later"
