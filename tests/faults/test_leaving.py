"""Ranks that leave a job in each way: nobody hangs, and the next launch resumes the newest complete step."""

import fcntl
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fastckpt_run.cli import main
from tests.conftest import MARK
from tests.faults.forks import Server
from tests.faults.jobs import DEADLINE, HERE, Job
from tests.faults.leaving import ALONE, CLOSES, COLLECTIVE, ENDS, FAILS, WAYS

STEPS, MORE, AT, DISK = 8, 10, 5, 3
KINDS = ("ddp", "lines", "fsdp2", "dcp", "deepspeed", "trainer")
HANG_TIMEOUT = "10"
TORCH = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.nn.parallel", "fastckpt.fsdp", "fastckpt.dcp")
MODULES = {
    "deepspeed": ("deepspeed.runtime.zero.muon.muon_optimizer", "fastckpt.deepspeed"),
    "trainer": ("fastckpt.huggingface", "tests.e2e.huggingface.stock"),
}
"""What jobs of a kind import beside torch."""


@dataclass(frozen=True)
class Field:
    """A field of the table: what saves, and how which rank leaves."""

    kind: str
    way: str
    rank: int = 1

    def __str__(self) -> str:
        return f"{self.kind}-{self.way}" + ("" if self.rank else "-first")

    @property
    def other(self) -> int:
        return 1 - self.rank

    @property
    def lends(self) -> bool:
        """Whether later saves of the other have what this rank saved last."""
        return self.kind in ALONE and self.way in (*CLOSES, "returns", "sys-exit-0") and self.rank > 0

    @property
    def hangs(self) -> bool:
        """Whether one rank waits for another, in a collective of the training, until the launcher ends both."""
        return self.way == "hang" or (self.kind == "trainer" and self.way in (*CLOSES, "returns"))

    @property
    def code(self) -> int:
        """What the launcher exits with: a rank that others need takes these along."""
        closes = self.way in CLOSES and self.kind not in (*COLLECTIVE, "trainer")
        ends = self.way in ENDS and self.kind in ALONE
        return 0 if closes or ends else 1


class Launches(Job):
    """Launches by a server, which forks them."""

    def __init__(self, folder: Path, server: Server) -> None:
        super().__init__(folder)
        self._server = server

    def launch(self, kind: str, *script: object, **environment: str) -> int:
        """Run a job to its end: within the deadline, and without leaving anything behind."""
        self.launches += 1
        folder, program = str(self.folder), str(HERE / "leaving.py")
        arguments = ["--out", folder, "--checkpoint-dir", str(self.checkpoint_dir), "--kind", kind, "--disk", str(DISK)]
        command = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "0", program, *arguments]
        variables = os.environ | self._environment() | environment
        told = [*command, *map(str, script)]
        code, left = self._server.launch(told, variables, self.output, DEADLINE)
        assert code is not None, f"hangs:\n{self.text()}"
        assert not left, f"left behind: {left}\n{self.text()}"
        shm = os.environ["FASTCKPT_SHM_DIR"]
        assert os.listdir(shm) == [], f"left in shared memory:\n{self.text()}"
        return code

    def lines(self, rank: int, what: str, launch: int) -> list[dict[str, Any]]:
        """What a rank logged of something in a launch."""
        starts = [list(lines) for _, lines in itertools.groupby(self.log(rank), key=_counter())]
        return [line for line in starts[launch - 1] if what in line] if len(starts) >= launch else []

    def steps(self, rank: int, what: str) -> set[int]:
        return {line[what] for line in self.lines(rank, what, 1)}


def _counter() -> Callable[[dict[str, Any]], int]:
    """Counts the launches in a log."""
    launch = 0

    def count(line: dict[str, Any]) -> int:
        nonlocal launch
        launch += "loaded" in line
        return launch

    return count


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[str], Server]]:
    """By kinds of jobs. They outlive the tests that ask for them first."""
    made: dict[tuple[str, ...], Server] = {}

    def server_for(kind: str) -> Server:
        modules = (*TORCH, *MODULES.get(kind, ()))
        if modules not in made:
            # DeepSpeed pads partitions with what is in memory: the same in each run
            fixed = {"DS_ACCELERATOR": "cpu", "MALLOC_PERTURB_": "90", "TQDM_DISABLE": "1"}
            path = f"{os.environ['PYTHONPATH']}:{HERE.parents[1]}"
            environment = {name: value for name, value in os.environ.items() if name != MARK}
            made[modules] = Server(*modules, environment=environment | fixed | {"PYTHONPATH": path})
        return made[modules]

    yield server_for
    for server in made.values():
        server.close()


@pytest.fixture
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, servers: Any) -> Callable[[str], Launches]:
    """The run of a kind that no rank leaves, made once, whoever of the processes of these tests asks first."""
    own = tmp_path_factory.getbasetemp()
    common = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def reference(kind: str) -> Launches:
        job = Launches(common / f"uninterrupted-leaving-{kind}", servers(kind))
        with (job.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (job.folder / "done").exists():
                assert job.launch(kind, "--steps", MORE) == 0, job.text()
                (job.folder / "done").touch()
        return job

    return reference


def newest_whole(job: Launches, field: Field) -> int:
    """The newest step of which both ranks have said that it is saved, or one has, and the other lends its part."""
    saved, others = job.steps(field.rank, "saved"), job.steps(field.other, "saved")
    begun = max(saved | job.steps(field.rank, "skipped"), default=0)
    lent = {step for step in others if step >= begun} if field.lends else set()
    return max(saved & others | lent, default=0)


def states(job: Launches, rank: int, launch: int) -> dict[int, str]:
    found = job.lines(rank, "state", launch)
    return {line.get("step", line.get("loaded")): line["state"] for line in found}


def assert_whole(listed: dict[str, Any]) -> None:
    """What counts has what each rank has saved."""
    for checkpoint in listed["checkpoints"]:
        if checkpoint["whole"]:
            manifest = json.loads(Path(checkpoint["path"], "manifest.json").read_text())
            written = manifest["details"]["ranks"]
            assert sorted(written) == ["0", "1"] and all(written.values()), manifest
            names = {name for names in written.values() for name in names}
            assert all(Path(checkpoint["path"], name).is_file() for name in names), manifest


def said_of(job: Launches, command: str) -> Any:
    """What a command of fastckpt's says of the checkpoints of a job."""
    result = CliRunner().invoke(main, [command, str(job.checkpoint_dir), "--json"])
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


def steps_that_may_be_resumed(field: Field, newest: int) -> set[int]:
    """By what the rank that leaves does, and by what both have said: ``newest`` was whole."""
    if field.way == "closes-early":
        if field.kind == "trainer":
            return {1}
        return {STEPS} if field.lends else {0}  # without a loan no step was ever whole, which is said
    if field.lends:
        return {newest, STEPS} if field.way == "closes-at-another-step" else {STEPS}
    if field.way in ("raises-before", "raises-in"):
        return {AT - 1}
    if field.way == "closes-at-another-step" and field.kind in ALONE:
        return {newest}  # of the saves before, each rank makes those that it comes to in time
    # who is killed may have saved a step, and not have said so; a Trainer's callback says so in its next step
    may_be_newer = field.way in FAILS or field.kind == "trainer"
    return {step for step in (newest, newest + may_be_newer) if AT - 1 <= step <= AT}


EACH_WAY_ONCE = (
    Field("ddp", "returns"),
    Field("ddp", "closes-early"),
    Field("lines", "closes-at-another-step"),
    Field("fsdp2", "closes-at-another-step"),
    Field("ddp", "raises-before"),
    Field("lines", "raises-in"),
    Field("dcp", "raises-after"),
    Field("ddp", "sys-exit"),
    Field("ddp", "os-exit-0"),
    Field("deepspeed", "sigterm"),
    Field("lines", "sigkill"),
    Field("trainer", "hang"),
)
ALL = tuple(Field(kind, way) for kind, way in itertools.product(KINDS, WAYS) if kind in ALONE or not way.endswith("-0"))
FIRST = tuple(Field(kind, way, 0) for kind in ALONE for way in (*ENDS, *CLOSES, "raises-after"))


def fields() -> Iterator[Any]:
    for field in dict.fromkeys(EACH_WAY_ONCE + ALL + FIRST):
        marks = [pytest.mark.frameworks] if field.kind in MODULES else []
        yield pytest.param(field, id=str(field), marks=marks + [pytest.mark.campaign] * (field not in EACH_WAY_ONCE))


@pytest.mark.parametrize("field", fields())
def test_the_next_launch_resumes_the_newest_complete_step_after_a_rank_left(
    field, tmp_path, servers, uninterrupted, record_property
):
    job, reference = Launches(tmp_path / "job", servers(field.kind)), uninterrupted(field.kind)
    environment = {"FASTCKPT_HANG_TIMEOUT": HANG_TIMEOUT} if field.hangs else {}
    script = ("--steps", STEPS, "--way", field.way, "--rank", field.rank, "--step", AT)
    code, newest = job.launch(field.kind, *script, **environment), newest_whole(job, field)
    assert_whole(said_of(job, "ls"))
    choice = said_of(job, "which")["choice"]
    assert job.launch(field.kind, "--steps", MORE) == 0, job.text()

    [[first], [second]] = [job.lines(rank, "loaded", 2) for rank in (0, 1)]
    step, tier = first["loaded"], first["tier"]
    reasons = {line["reason"] for line in job.lines(field.other, "skipped", 1)}
    record_property("field", f"{field}: exit code {code}, step {step}, {tier or 'nothing'}; skipped: {reasons}")
    assert second["loaded"] == step == (choice["step"] if choice else 0), job.text()
    assert tier == ("storage" if step else ""), job.text()
    assert code == field.code, job.text()
    assert step in steps_that_may_be_resumed(field, newest), f"newest {newest}:\n{job.text()}"
    if any("has closed" in reason or "has ended" in reason for reason in reasons):
        kept = f"step {step} of history 1" if step else "none"
        assert re.search(
            rf"saves? (was|were) skipped, as rank {field.rank} has .*: the newest checkpoint is {kept}", job.text()
        )
    if field.way in CLOSES and field.kind in COLLECTIVE:
        assert "the checkpointer is closed" in job.text()
    for rank in (0, 1):
        found, expected = states(job, rank, 2), states(reference, rank, 1)
        assert found == {each: expected[each] for each in range(step, MORE + 1)}, f"rank {rank}:\n{job.text()}"
