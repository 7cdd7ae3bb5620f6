"""Ranks that leave a job: nobody hangs, and the next launch resumes the newest complete step."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fastckpt_run.cli import main
from tests.faults.faults import Fault, delay, fail, kill, leave
from tests.faults.jobs import Job
from tests.faults.table import PROGRAMS

STEPS, AT = 8, 5
SAVES = ("--memory", "1", "--disk", "100", "--full")


@dataclass(frozen=True)
class Field:
    """A field of the table: what saves, how which rank leaves after which step, and what the next launch resumes."""

    program: str
    way: str | Fault
    resumed: int
    code: int
    rank: int = 1
    at: int = AT
    said: str = ""

    def __str__(self) -> str:
        return f"{self.program}-{self.way if isinstance(self.way, str) else self.way.deed}-{self.rank}-{self.at}"


ENDED, CLOSED = "rank {rank} has ended", "rank {rank} has closed"
FIELDS = (
    # what a rank has saved last counts for later saves of the other, if it has closed and is not a node's first
    Field("ddp", "returns", STEPS, 0),
    Field("ddp", "closes", STEPS, 0, at=0),
    Field("ddp", "exits", AT, 0, said=ENDED),
    Field("ddp", "returns", AT, 0, rank=0, said=CLOSED),
    Field("fsdp2", "closes", AT, 0, said=CLOSED),
    Field("fsdp2", "closes", 0, 0, at=0, said=CLOSED),
    Field("fsdp2", "returns", AT, 1),
    Field("dcp", "closes", AT, 1, said="the checkpointer is closed"),
    # no restart is left after an error
    Field("ddp", fail(1, "train.step", AT + 1), AT, 1),
    Field("fsdp2", leave(1, "snapshot.fill", AT + 1), AT, 1),
    Field("dcp", leave(1, "train.step", AT + 1, code=0, at_once=True), AT, 1),
    Field("ddp", kill(1, "snapshot.fill", AT + 1), AT, 1),
)
CHOSEN = (0, 2, 4)


def said_of(job: Job, command: str) -> Any:
    """What a command of fastckpt's says of the checkpoints of a job."""
    result = CliRunner().invoke(main, [command, str(job.checkpoint_dir), "--json"])
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    "field",
    [pytest.param(f, id=str(f), marks=[pytest.mark.campaign] * (i not in CHOSEN)) for i, f in enumerate(FIELDS)],
)
def test_the_next_launch_resumes_the_newest_complete_step_after_a_rank_left(new_job: Any, field: Field) -> None:
    program, job = PROGRAMS[field.program].file, new_job()
    is_orderly = isinstance(field.way, str)
    script = ["--leave", str(field.rank), str(field.at), field.way] if is_orderly else []
    script += ["--apart"] if is_orderly and field.program == "ddp" else []
    job.with_faults(*([] if is_orderly else [field.way]))
    options = {"program": program, "restarts": 0}
    assert job.start(*SAVES, "--steps", str(STEPS), *script, **options).wait() == field.code, job.text()
    assert not job.arena().exists()
    for listed in said_of(job, "ls")["checkpoints"]:
        written = json.loads(Path(listed["path"], "manifest.json").read_text())["details"]["ranks"]
        assert sorted(written) == ["0", "1"] and all(written.values()), "what counts has what each rank has saved"
    choice = said_of(job, "which")["choice"]
    job.run(*SAVES, "--steps", str(STEPS + 2), **options)
    loaded = [[line for line in job.log(rank) if "loaded" in line][-1] for rank in (0, 1)]
    assert {line["loaded"] for line in loaded} == {field.resumed} == {choice["step"] if choice else 0}, job.text()
    assert {line["tier"] for line in loaded} == {"storage" if field.resumed else ""}
    assert all(line.get("equal", field.resumed == 0) for line in loaded), "the very state that was saved"
    said = field.said.format(rank=field.rank)
    assert said in job.text() + " ".join(line.get("reason", "") for line in job.log(1 - field.rank))
    if said.startswith("rank"):
        kept = f"step {field.resumed} of history 1" if field.resumed else "none"
        assert re.search(rf"as rank {field.rank} has .*: the newest checkpoint is {kept}", job.text()), job.text()


def test_after_an_exception_in_one_rank_a_copy_in_progress_of_another_completes(new_job: Any) -> None:
    """Rank 1 fails when it has saved step 6, which rank 0 is still copying: that step is what is resumed."""
    job = new_job().with_faults(delay(seconds=2, at="snapshot.fill", step=6), fail(1, at="train.step", step=7))
    job.start("--apart", "--wait-at", "6", restarts=0).wait_for("waiting", 6, rank=1)
    job.until(lambda: job.injected() == 1, "the copy")
    job.go_on(6)
    assert job.wait() == 1
    assert job.injected() == 2 and "InjectedError" in job.text()
    job.run("--apart", "--steps", "8", restarts=0)
    assert job.resumes(0) == job.resumes(1) == [(0, ""), (6, "storage")]
