"""`fastckpt plan`: against the memory that a job really takes; of strangers' checkpoints; of a script; bad input."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fastckpt import DdpCheckpointer, StorageType
from fastckpt._core.config import AGENT_VARIABLE, TRIAL_VARIABLE, Settings
from fastckpt._core.format import skeleton
from fastckpt._core.inspect import checkpoint_sizes
from fastckpt._core.inspect.saved_profile import saved_profile
from fastckpt._core.memory.census import census
from fastckpt._core.policy.resource_plan import PAGE
from fastckpt._core.saver.server import Saver
from fastckpt._core.storage.history import DirectoryHistories, Record
from fastckpt._core.storage.local.layout import Layout
from fastckpt.errors import ConfigError
from fastckpt_run.plan.trial_storage import USED, Remains, clear
from tests.cli.conftest import publish
from tests.cli.test_docs import leave_log
from tests.e2e.ddp.test_loop import Training

SCRIPT = Path(__file__).with_name("trained.py")
ROW = 4 * 1000
"""Bytes by which a state of `growing` grows in each step."""


def growing(step: int) -> dict[str, Any]:
    return {"table": torch.ones(step, 1000), "step": step}


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Iterator[Path]:
    """A job whose table grows, which has saved three times, and the log of one that lost a worker twice."""
    directory = tmp_path_factory.mktemp("table") / "run"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTCKPT_SHM_DIR", shm)
        with DdpCheckpointer(directory) as checkpointer:
            for step in (100, 200, 300):
                checkpointer.save_checkpoint(step, growing(step), storage_type=StorageType.DISK)
                assert checkpointer.wait_latest_checkpoint(60)
    leave_log(directory)
    yield directory


def held(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# --- against what a job takes


@pytest.mark.parametrize("slots", ["2", "3"])
def test_the_arena_of_a_plan_is_that_of_the_job(fastckpt, directory, monkeypatch, slots):
    """And that of the formula in docs/guides/memory.md: of each slot, and of all."""
    formula = (Path(__file__).parents[2] / "docs/guides/memory.md").read_text()
    assert "4 KiB x (2 + ranks of the node)" in formula and "3 x slot, + 4 KiB x (4 + ranks of the node)" in formula
    monkeypatch.setenv("FASTCKPT_SLOTS", slots)
    with DdpCheckpointer(directory) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save_checkpoint(step, growing(300), storage_type=StorageType.DISK)
            assert checkpointer.wait_latest_checkpoint(60)
        (entry,) = census(Path(os.environ["FASTCKPT_SHM_DIR"]))
        slot = sum(path.stat().st_size for path in (directory / "checkpoint-3").glob("*.pt")) + PAGE * (2 + 1)
        plan = fastckpt("plan", directory, "--json").document["memory"]
        here = fastckpt("plan", f"{directory}@3:memory", "--json").document["memory"]
    assert (plan["slot"], plan["arena"]) == (slot, int(slots) * slot + PAGE * (4 + 1))
    # A newest save may have no digests yet; and the telemetry is beside the arena.
    assert plan["arena"] - PAGE - entry.size in (0, PAGE)
    assert plan["slots"] == int(slots) == plan["slots_that_fit"] and here["arena"] == plan["arena"]
    assert list(directory.glob("*plan*")) == []


def test_a_table_that_grows_has_a_step_at_which_memory_ends(fastckpt, table):
    growth = fastckpt("plan", table, "--memory", "40MiB", "--json").document["growth"]
    assert (growth["points"], growth["method"], growth["step"]) == (3, "least squares", 300)
    assert growth["per_step"] == pytest.approx(ROW, rel=0.02)
    # 40 MiB less a twentieth hold two slots of 19 MiB, and less half three of 6.7 MiB.
    assert growth["two_slots_until"] == pytest.approx(19 * 2**20 / ROW, rel=0.02)
    assert growth["three_slots_until"] == pytest.approx(20 / 3 * 2**20 / ROW, rel=0.02)
    two = fastckpt("plan", f"{table}@200", "--json").document["growth"]
    assert (two["points"], two["method"], two["step"]) == (2, "first and last", 200)
    assert fastckpt("plan", f"{table}@100", "--json").document["growth"] is None
    assert "two slots alone fit" in fastckpt("plan", table, "--memory", "4MiB").out
    assert fastckpt("plan", table, "--memory", "2MiB", "--json").document["memory"]["slots_that_fit"] == 0
    assert "it does not fit: two slots of 1.2 MiB" in fastckpt("plan", table, "--memory", "2MiB").out


def test_costs_and_failures_are_those_of_the_event_log(fastckpt, table):
    plan = fastckpt("plan", table, "--json").document
    assert plan["failures"]["failures"] == 2 and plan["mtbf"]["seconds"] == pytest.approx(25.3 / 2, rel=0.01)
    assert plan["failures"]["least"] < plan["mtbf"]["seconds"] < plan["failures"]["most"]
    assert (plan["intervals"]["memory"], plan["intervals"]["storage"]) == (78, 78)
    assert plan["persist"]["written_now"] > 0
    rare = fastckpt("plan", table, "--mtbf", "4h", "--persist-mbps", "100", "--json").document
    assert rare["mtbf"] == {"seconds": 14400.0, "source": "--mtbf"}
    assert plan["goodput"]["memory"] < rare["goodput"]["memory"] < rare["goodput"]["without"]
    assert rare["persist"]["seconds"] == pytest.approx(rare["bytes"]["node"] / 100e6)
    assert rare["persist"]["written_now"] is None  # nothing is written where the rate is given
    shown = fastckpt("plan", table, "--process-memory", "2GiB", "--restart-seconds", "30s").out
    assert "resources: {limits: {memory: " in shown and "with 2.0 GiB of " in shown
    slow = fastckpt("plan", table, "--json", env={"FASTCKPT_PERSIST_MBPS": "0.001"}).document
    assert slow["persist"]["written_now"] == 1000
    given = fastckpt("plan", table, "--every", "5,10", "--json").document["intervals"]
    assert (given["memory"], given["storage"]) == (5, 10)


# --- what something else wrote


def test_checkpoints_of_torch_save_and_dcp_are_planned_by_their_files_shards_and_copies(fastckpt, tmp_path):
    assert checkpoint_sizes.SLACK == skeleton.SLACK
    torch.save(growing(200), tmp_path / "model.pt")
    size = (tmp_path / "model.pt").stat().st_size
    plan = fastckpt("plan", tmp_path / "model.pt", "--ranks-per-node", "4", "--nodes", "2", "--json").document
    model, *own = [file["size"] for file in plan["bytes"]["files"]]
    assert size + 16384 <= model < size + 16384 + PAGE and "each rank's own state" in plan["assumed"]
    assert plan["bytes"]["node"] == model + 4 * own[0]
    assert (plan["ranks"], plan["checkpoint"]) == (8, None)
    dcp.save(growing(12000), checkpoint_id=tmp_path / "dcp", no_dist=True)
    shards = sum(path.stat().st_size for path in (tmp_path / "dcp").glob("*.distcp"))
    divided = (tmp_path / "dcp", "--world-size", "2", "--nodes", "2")
    one, two = (fastckpt("plan", *arguments, "--json").document for arguments in (divided[:1], divided))
    assert one["ranks"] == 1 and {file["role"] for file in one["bytes"]["files"]} >= {"a shard of each rank"}
    assert two["bytes"]["node"] < one["bytes"]["node"] - shards * 0.45
    assert "3 slots of 45.8 MiB\n" in fastckpt("plan", *divided[:1]).out
    assert "3 slots of 22.9 MiB + copies 45.8 MiB\n" in fastckpt("plan", *divided).out


def test_the_profile_in_a_checkpoint_gives_costs_without_event_logs(fastckpt, tmp_path, three):
    """One that cannot be read was not measured."""
    assert saved_profile(checkpoint_sizes.checkpoint_sizes(str(three), "/none").source) is None
    training = Training(tmp_path / "job")
    with training.checkpointer as checkpointer:
        step = training.until_known(checkpointer.resume())
        while True not in training.steps(step + 1, step + 1):
            step += 1
        profile = checkpointer._frequency.schedule.known.profile
        plan = fastckpt("plan", f"{tmp_path / 'job'}@latest:memory", "--json").document
    assert plan["step"]["seconds"] == profile.iteration and "profile" in plan["step"]["source"]
    assert plan["snapshot"]["seconds"] == profile.stall + profile.copy_slowdown
    assert plan["intervals"]["memory"] and "the job itself" in plan["intervals"]["source"]
    assert [each["remedy"] for each in plan["unknown"]] == [
        f"give --{option}" for option in ("restart-seconds", "mtbf", "process-memory")
    ]


# --- bad input


REFUSED = {
    "--mtbf -4h": "is no time above 0",
    "--mtbf 4parsecs": "give a number with a unit of ms, s, min",
    "--mtbf 1e300": "below 300 years",
    "--restart-seconds -1": "is no time of 0 or more",
    "--memory 0": "is no size above 0",
    "--persist-mbps nan": "is no rate above 0",
    "--every often": "give steps for memory and storage",
    "--every 10,15": "give storage a multiple of memory",
    "--overhead 2": "overhead is 2.0",
    "--nodes 3 --ranks-per-node 2 --world-size 7": "do not go together",
    "more": "more follows",
}


def test_options_that_mean_nothing_are_refused(fastckpt, table):
    for arguments, text in REFUSED.items():
        said = fastckpt("plan", table, *arguments.split())
        assert said.code == 2 and not said.out and text in " ".join(said.err.split()), arguments


def test_places_without_a_checkpoint_are_an_error(fastckpt, tmp_path, table):
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.pt").touch()
    shutil.copytree(table, tmp_path / "run")
    manifest = tmp_path / "run/checkpoint-300/manifest.json"
    manifest.write_text(manifest.read_text().replace('"size": ', '"size": 9'))
    places = [tmp_path / name for name in ("empty", "none", "nothing.pt", "none.py", "run@300")]
    for what in (f"{table}@77", *places):
        said = fastckpt("plan", what)
        assert said.code == 2 and said.err.startswith("fastckpt: error: ") and not said.out, what
    assert "digest of the manifest" in said.err
    newest = fastckpt("plan", tmp_path / "run", "--json").document
    assert newest["checkpoint"]["step"] == 200  # as a resume would choose


# --- a script


def test_a_trial_is_refused_a_directory_with_anything_in_it(tmp_path, monkeypatch, table):
    shutil.copytree(table, tmp_path / "run")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.txt").write_text("of the user")
    monkeypatch.setenv(TRIAL_VARIABLE, str(tmp_path / "record"))
    saver = Saver(Settings.from_environment())
    saver.start()
    monkeypatch.setenv(AGENT_VARIABLE, saver.address)
    for directory in (tmp_path / "run", tmp_path / "notes"):
        before = held(directory)
        with pytest.raises(ConfigError, match="is not empty: it has"):
            DdpCheckpointer(directory)
        assert held(directory) == before
    with pytest.raises(ConfigError, match="is a URL"):
        DdpCheckpointer("memory://bucket/run")
    saver.close()
    assert not (tmp_path / "record").exists()


@pytest.mark.parametrize("holder", [4000, 5000], ids=["trial", "another job"])
def test_what_a_trial_stored_is_removed_unless_another_job_has_come(directory, holder):
    publish(directory, 1)
    (directory / "script.log").write_text("of the script")
    for record in (Record(1, launch="trial", holder={"pid": 4000}), Record(2, launch="other", holder={"pid": holder})):
        assert DirectoryHistories(Layout(directory)).create(record)
    before = held(directory)
    with Layout(directory).writing():  # somebody writes there
        assert clear(directory, 4000, is_new=True) == Remains(why=USED) and held(directory) == before
    remains = clear(directory, 4000, is_new=True)
    if holder == 4000:
        assert held(directory) == {"script.log": b"of the script"} and remains == Remains(["script.log"])
        (directory / "script.log").unlink()
        for is_new in (False, True):
            assert clear(directory, 4000, is_new=is_new) == Remains() and directory.exists() != is_new
    else:
        assert held(directory) == before and remains == Remains(why=USED)


def test_a_plan_of_a_script_measures_it_and_leaves_nothing(fastckpt, tmp_path):
    """The script names another place for each model, and a second store: nothing is stored there."""
    shm, out, elsewhere = Path(os.environ["FASTCKPT_SHM_DIR"]), tmp_path / "out", tmp_path / "elsewhere"
    (elsewhere / "remote").mkdir(parents=True)
    (elsewhere / "model.pt").write_text("of the user")
    dead = shm / "fastckpt-plan-4194305-dead"  # of a plan that was killed: no process has a number above 2**22
    dead.mkdir()
    os.utime(dead, (0, 0))
    script = [SCRIPT, "--out", out, "--elsewhere", elsewhere]
    said = fastckpt("plan", "--ranks-per-node", "2", "--json", "--", *script, env={"FASTCKPT_PRELOAD": "auto"})
    assert said.code == 0, said.err
    plan = said.document
    assert (plan["ranks"], plan["trial"]["directory"]) == (2, str(out))
    assert plan["bytes"]["node"] > 1_200_000 and plan["memory"]["processes"] > 50 << 20
    assert plan["memory"]["cgroup"] > plan["memory"]["processes"] + plan["memory"]["arena"]
    assert plan["trial"]["slots"] >= 1, "those that had a save in them when the script was ended"
    slots = plan["memory"]["arena"] * plan["trial"]["slots"] / plan["memory"]["slots"]
    assert slots * 0.99 - 8 * PAGE <= plan["trial"]["arena"] <= plan["memory"]["arena"]
    assert plan["persist"]["seconds"] > 0 and "event logs" in plan["persist"]["source"]
    assert plan["failures"] is None and plan["growth"] is None
    assert not out.exists() and held(elsewhere) == {"model.pt": b"of the user"}
    assert list(shm.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "code", "told"),
    [
        ("raise SystemExit('no data: give some')", 2, ("ended before its first save", "no data: give some")),
        ("import os, sys, time; os.kill(int(sys.argv[1]), 15); time.sleep(600)", 128 + signal.SIGTERM, ()),
    ],
    ids=["the script ends", "the plan is ended"],
)
def test_a_plan_without_a_save_ends_its_script_and_leaves_nothing(fastckpt, tmp_path, program, code, told):
    (tmp_path / "script.py").write_text(program)
    said = fastckpt("plan", "--", tmp_path / "script.py", os.getpid())
    assert said.code == code and not said.out and all(text in said.err for text in told)
    assert list(Path(os.environ["FASTCKPT_SHM_DIR"]).iterdir()) == []
