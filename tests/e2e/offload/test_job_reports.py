"""Event logs of real jobs that offload: what the agent recorded, and what `fastckpt report` makes of it."""

import json
import re

from click.testing import CliRunner

from fastckpt._core.report.events import find
from fastckpt_run.cli import main
from tests.e2e.offload.test_jobs import STEPS, endings, run, scratch  # noqa: F401 (a fixture)
from tests.e2e.offload.test_page import assert_as_on_the_page
from tests.faults.faults import kill
from tests.faults.jobs import Job, assert_all_injected
from tests.faults.test_disk import device, leave  # noqa: F401 (a fixture)
from tests.unit._core.report.schema import faults

MIB = 1 << 20


def reported(job: Job) -> tuple[list[dict], str]:
    """What the report says of offloading: its JSON, and its text."""
    document, text = (
        CliRunner().invoke(main, ["report", str(job.checkpoint_dir), *more], env={"COLUMNS": "400"})
        for more in (["--json"], [])
    )
    assert document.exit_code == text.exit_code == 0, document.output + text.output
    return json.loads(document.output)["offloaded"], text.output


def events(path) -> list[dict]:
    found = map(json.loads, path.read_text().splitlines())
    return [event for event in found if event["event"].startswith("offload_")]


def last_line(job: Job, rank: int, name: str):
    return [line[name] for line in job.log(rank) if name in line][-1]


def in_log(job: Job) -> list[dict]:
    [path] = find(str(job.checkpoint_dir))
    found = events(path)
    assert not [fault for event in found for fault in faults(event)]
    return found


def test_the_report_of_a_job_that_offloads_names_what_was_planned_and_what_came(new_job, scratch, uninterrupted):  # noqa: F811
    # What is needed while it waits to be written is not written, and then less is than was planned.
    job = run(new_job(), "--offload", str(scratch), "--settle")
    assert endings(job) == endings(uninterrupted(*STEPS))
    found, text = reported(job)
    assert_as_on_the_page("fastckpt report run | grep -e offloading -e RANK -e scratch", text, scratch)
    assert [(one["rank"], one["forwards"], one["steps"]) for one in found] == [(0, 4, 3), (1, 4, 3)]
    for one in found:
        assert one["directory"] == str(scratch) and one["budget"] == 8 * MIB and not one["ends"]
        assert one["written"] == last_line(job, one["rank"], "written")
        assert one["read"] == last_line(job, one["rank"], "read")
        assert one["planned_written"] == last_line(job, one["rank"], "planned") == one["step_written"]
        assert 0 < one["kept"] < one["saved"] - 30 * MIB and one["step_wait"] > 0
        assert one["waited_for_writes"] + one["waited_for_reads"] >= 3 * one["step_wait"] - 1e-6
    assert re.search(r"^offloading: activations of 2 ranks; a step writes (\S+ MB), planned \1, and waits ", text, re.M)
    by_name = sorted(in_log(job), key=lambda event: (event["rank"], event["time"]))
    assert next(event["event"] for event in by_name if event["rank"] == 0) == "offload_planned"
    assert len(by_name) <= 2 * 4, "a plan, the first step that had one, perhaps one later, and the end"
    same = sorted(events(job.events), key=lambda event: (event["rank"], event["time"]))
    assert same == by_name, "each once in the file of --fast-events"


def test_the_report_of_a_job_with_a_full_scratch_disk_names_that_rank_with_error_and_remedy(
    new_job,
    tmp_path,
    uninterrupted,
    device,  # noqa: F811
):
    (tmp_path / "scratch-0").mkdir()
    (tmp_path / "scratch-1").symlink_to(device.path)
    leave(device.path, 9 * MIB)
    job = run(new_job(), "--offload", str(tmp_path / "scratch-{rank}"))
    assert endings(job) == endings(uninterrupted(*STEPS))
    found, text = reported(job)
    assert [len(one["ends"]) for one in found] == [0, 1]
    [end] = found[1]["ends"]
    assert end["error"] == "No space left on device" and end["directory"] == str(tmp_path / "scratch-1")
    assert end["remedy"].startswith("Free space there")
    assert found[0]["steps"] == 3 and found[1]["steps"] == 0, (
        "a step that does not offload is not compared with its plan"
    )
    assert found[1]["step_written"] is None and found[1]["forwards"] == 4
    assert_as_on_the_page("fastckpt report run | grep ended", text, tmp_path / "scratch-1")
    assert [event["rank"] for event in in_log(job) if event["event"] == "offload_ended"] == [1]


def test_the_report_adds_up_what_the_processes_of_a_rank_did(new_job, scratch):  # noqa: F811
    """Also of a job that does not close its checkpointer."""
    job = new_job().with_faults(kill(rank=1, at="offload.forward", step=3))
    run(job, "--offload", str(scratch), "--unclosed")
    assert_all_injected(job)
    killed = next(event for event in in_log(job) if event["event"] == "offload_measured" and event["rank"] == 1)
    assert (killed["forwards"], killed["steps"]) == (2, 1), "before its third forward it had reported its second one"
    _, one = reported(job)[0]
    assert one["forwards"] == 2 + last_line(job, 1, "forwards") == 4 and one["steps"] == 2
    assert one["written"] == killed["written"] + last_line(job, 1, "written")
