"""Ranks that save different steps: no mixed checkpoint is ever resumed, and the ranks get an error or a warning."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.faults.jobs import run_forked

pytestmark = pytest.mark.usefixtures("forked_launchers")

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
import torch.distributed as dist
from fastckpt.ddp import DdpCheckpointer, StorageType

out, steps, pace = Path(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
with DdpCheckpointer(out / "checkpoints") as checkpointer:
    checkpointer.load_checkpoint()
    said = []
    for at, step in enumerate(steps[rank]):
        if step == "dies":
            time.sleep(1.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if step is not None:
            result = checkpointer.save_checkpoint(step, {"time": at}, storage_type=StorageType.MEMORY)
            said.append(result.reason or bool(result))
        time.sleep(pace) if pace else dist.barrier()
    if pace:
        (out / f"done.{rank}").touch()
        while not (out / "done.0").exists():  # what rank 1 closes without a save is lent to the others
            time.sleep(0.1)
    else:
        loaded = checkpointer.load_checkpoint()
        (out / f"said.{rank}").write_text(json.dumps([said, checkpointer.loaded_step, loaded]))
dist.barrier()
dist.destroy_process_group()
"""


def run(folder: Path, *steps: list[Any], code: int = 0, pace: float = 0.0) -> tuple[str, list[Any]]:
    """What is printed, and said to each rank, if ranks save these steps together, or in turns of so many seconds."""
    (folder / "train.py").write_text(PROGRAM)
    arguments = [folder / "train.py", folder, json.dumps(steps), pace]
    text = run_forked(folder, "--nproc_per_node=2", *arguments, code=code)
    return text, [json.loads(path.read_text()) for path in sorted(folder.glob("said.*"))]


def test_a_rank_whose_step_is_one_ahead_is_refused(tmp_path: Path):
    """Else what it saved as step 3, at the time of step 2, would be resumed with step 3 of the other."""
    text, ((first, *_), (second, *_)) = run(tmp_path, [1, 2, 3, 4], [2, 3, 4, 5], code=1)
    refused = [reason for reason in [*first, *second] if reason is not True]
    assert len(refused) == 3 and all("they count steps differently" in reason for reason in refused), (first, second)
    assert text.count("not every rank saves the same steps") == 1
    assert "resumed" not in text


def test_steps_that_one_rank_omits_are_named_and_the_others_count(tmp_path: Path):
    """Whether it saved others in their place, or its save failed and was caught."""
    text, ranks = run(tmp_path, [1, 2, 3, 5, 7, 8, 9], [1, 2, 4, 6, 7, None, 9])
    assert re.search(r"rank 1 went on to step \d without saving step 3, which can never be resumed", text), text
    assert [loaded for _, *loaded in ranks] == [[9, {"time": 6}]] * 2, text


@pytest.mark.parametrize("way", ["dies", pytest.param("never saves", marks=pytest.mark.campaign)])
def test_what_a_rank_has_to_do_is_said_if_it_never_saves_and_not_if_it_dies(tmp_path: Path, way: str):
    """It is late in both cases at first, while the other one goes on; the launcher says of what it died."""
    others = [1, 2, 3, "dies"] if way == "dies" else []
    text, _ = run(tmp_path, [*range(1, 40)], others, code=int(way == "dies"), pace=0.2)
    skipped = [line for line in text.splitlines() if "saves are skipped from step" in line]
    if way == "dies":
        assert "rank 1 died: SIGKILL" in text and not skipped, text
    else:
        assert len(skipped) == 1 and "waits for local rank 1 to save it, too" in skipped[0], text
        assert "If one of them never saves, call save_checkpoint(), or step(), on every rank" in skipped[0]
