"""Two checkpointers of one job resume the same step, wherever between their saves it is killed."""

import json
import shutil
from pathlib import Path
from typing import Any

from fastckpt._core.storage.local.directory import CheckpointDirectory

KILLS, LAST = (7, 12), 20
"""Steps at which a worker dies when the actor has been saved, and the critic has not."""
PROGRAM = f"""
import json, os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
from fastckpt.ddp import DdpCheckpointer, StorageType

out, directory = Path(sys.argv[2]), Path(sys.argv[4])
dist.init_process_group("gloo")
rank = dist.get_rank()
parts = dict.fromkeys(("actor", "critic"))
both = {{name: DdpCheckpointer(directory / name) for name in parts}}
for name, one in both.items():
    parts[name] = one.load_checkpoint().get("weights", torch.zeros(1000))
steps = {{name: one.loaded_step for name, one in both.items()}}
assert all(torch.equal(parts[name], torch.full((1000,), max(0.0, step))) for name, step in steps.items())
with (out / f"{{rank}}.jsonl").open("a") as log:
    log.write(json.dumps(steps) + "\\n")
for step in range(max(0, steps["actor"]) + 1, {LAST} + 1):
    for name, one in both.items():
        parts[name] += 1
        storage = StorageType.DISK if step % 5 == 0 else StorageType.MEMORY
        one.save_checkpoint(step, {{"weights": parts[name]}}, storage_type=storage)
        dist.barrier()
        mark = out / f"died-{{step}}"
        if name == "actor" and rank == 1 and step in {KILLS} and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
for one in both.values():
    one.close()
dist.barrier()
dist.destroy_process_group()
"""


def newest(directory: Path) -> int:
    return CheckpointDirectory(directory).checkpoints()[0].id.step


def test_two_checkpointers_killed_between_saves_resume_one_step_or_raise_an_error(new_job: Any) -> None:
    job = new_job()
    program = job.folder / "pair.py"
    program.write_text(PROGRAM)
    job.run(program=str(program), restarts=len(KILLS))
    resumed = [[json.loads(line) for line in (job.folder / f"{rank}.jsonl").open()] for rank in (0, 1)]
    assert resumed == [[{"actor": step, "critic": step} for step in (-1, *(step - 1 for step in KILLS))]] * 2, (
        job.text()
    )
    assert all(f"is passed over for step {step - 1}" in job.text() for step in KILLS)
    assert "goes on from" not in job.text()
    actor, critic = (job.checkpoint_dir / name for name in ("actor", "critic"))
    assert newest(actor) == newest(critic) == LAST
    # All that the critic has of the last steps is lost, and all that the actor has of those before.
    for place in (critic / "checkpoint-15", critic / "checkpoint-20", *actor.glob("checkpoint-*")):
        if place != actor / f"checkpoint-{LAST}":
            shutil.rmtree(place)
    left = newest(critic)
    job.run(program=str(program))
    assert json.loads((job.folder / "0.jsonl").read_text().splitlines()[-1]) == {"actor": LAST, "critic": left}
    error = next(line for line in job.text().splitlines() if "goes on from" in line)
    assert f"{critic} goes on from step {left}" in error
    assert f"{actor}, which was saved in step with it, from step {LAST}" in error
