"""Real jobs: a rank dies before the commit, the agent dies, the world changes; each state is found, bit for bit."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.faults.jobs import launcher_for
from tests.support import launchers
from tests.support.json_lines import whole_lines

HERE = Path(__file__).parent
DEADLINE = 240.0


class Job:
    """Launches of train.py in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, ranks: int, *script: str, program: str = "train.py") -> int:
        launcher = (*launcher_for(self.folder), "--standalone", "--max-restarts", "1", "--nproc-per-node", str(ranks))
        variables = os.environ | {"TMPDIR": str(self.folder), "FASTCKPT_PRELOAD": "auto"}
        with (self.folder / "output").open("ab") as output:
            command = [*launcher, str(HERE / program), "--out", str(self.folder), *script]
            self.process = launchers.start(command, variables, output.fileno())
        return self.process.wait(DEADLINE)

    def text(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def loads(self, rank: int = 0) -> list[dict[str, object]]:
        return whole_lines(self.folder / f"log.{rank}")

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def job(tmp_path: Path, forked_launchers: None) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.end()


def loaded(world: int, step: int, tier: str) -> dict[str, object]:
    return {"world": world, "loaded": step, "tier": tier, "equal": True}


def test_a_dcp_job_resumes_with_one_rank_instead_of_two_and_back(job: Job) -> None:
    # Rank 1 has written its part of step 3, and .metadata is not there: step 2 counts, which is in memory only.
    lost = job.run(2, "--until", "3", "--die", "1:snapshot.notify:3", "--memory", "2", "3", "--lose-agent")
    assert lost == -signal.SIGKILL, job.text()
    assert job.loads() == [loaded(2, 2, "memory")] == job.loads(1)

    # The next launch adopts what memory holds: the shards of two ranks, for one.
    lost = job.run(1, "--until", "8", "--memory", "8", "--lose-agent")
    assert lost == -signal.SIGKILL, job.text()
    assert job.loads()[1:] == [loaded(1, 3, "memory")]

    # And those of one for two; step 4 is on storage only by then.
    assert job.run(2, "--until", "10", "--also", "4", "--behind") == 0, job.text()
    assert job.loads()[2:] == [loaded(2, 4, "storage"), loaded(2, 8, "memory")] == job.loads(1)[1:]

    steps = [stored.id.step for stored in CheckpointDirectory(job.folder / "checkpoints").checkpoints()]
    assert steps[:2] == [10, 9] and {4, 5, 6, 7} <= set(steps)
    command = [sys.executable, "-m", "tests.e2e.dcp.stock", str(job.folder)]
    stock = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False, cwd=HERE.parents[2])
    assert stock.returncode == 0, stock.stderr
    assert sorted(stock.stdout.splitlines())[-1] == "checkpoint-9 2 files, 1 table"
    assert "checkpoint-10 2 files, 1 table" in stock.stdout.splitlines()
    assert "checkpoint-4 1 files, 1 table" in stock.stdout.splitlines()


PHASES = ["snapshot.skeleton", "snapshot.fill", "snapshot.commit", "snapshot.notify"]
PLACES = [f"{rank}:{phase}:3" for rank in (0, 1) for phase in PHASES]


@pytest.mark.campaign
@pytest.mark.parametrize("how", ["", "--behind"])
@pytest.mark.parametrize("place", [*PLACES, "0:snapshot.skeleton:3:2", "0:snapshot.fill:3:2"])
def test_a_dcp_job_whose_rank_dies_in_any_phase_resumes_the_last_commit(job: Job, place: str, how: str) -> None:
    """Only when rank 0 has committed, with .metadata, is its step there."""
    assert job.run(2, "--until", "4", "--die", place, "--memory", "2", "3", *how.split()) == 0, job.text()
    counts = 3 if place == "0:snapshot.notify:3" else 2
    assert job.loads() == [loaded(2, counts, "memory")] == job.loads(1)


@pytest.mark.campaign
def test_a_dcp_checkpoint_of_any_sharding_loads_into_any_other(job: Job) -> None:
    """Saved as one of these kinds by four ranks, or three, or two; loaded as any other by as many, or others."""
    kinds = ["ddp", "fsdp", "hsdp", "tp", "fsdp+tp"]
    assert job.run(4, "--save", "--kinds", *kinds, program="kinds.py") == 0, job.text()
    assert job.run(3, "--save", "--kinds", "fsdp", "ddp", program="kinds.py") == 0, job.text()
    assert job.run(2, "--save", "--kinds", *kinds, program="kinds.py") == 0, job.text()
    assert job.run(4, "--kinds", *kinds, program="kinds.py") == 0, job.text()
    said = job.loads()
    assert all(line["equal"] for line in said), said
    assert {(line["world"], line["kind"]) for line in said} >= {(4, "tp"), (3, "fsdp"), (2, "fsdp+tp")}
    steps = len(list(job.folder.glob("full.*")))
    assert len([line for line in said if line["world"] == 4]) == 5 * len(kinds) + steps * len(kinds)


@pytest.mark.campaign
def test_a_dcp_save_by_some_ranks_alone_is_refused(job: Job) -> None:
    """One of two ranks has nothing to save in the end, since DCP saves what both have once."""
    assert job.run(2, program="refusals.py") == 0, job.text()
    for rank in (0, 1):
        said = job.loads(rank)[0]
        assert said.pop("nothing") == "saved"
        assert said.pop("use_collectives") == "all ranks of the job"
        assert all("all" in str(why) for why in said.values()), said
