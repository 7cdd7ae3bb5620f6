"""Event logs of real jobs that offload: what the agent recorded, and what `fastckpt report` makes of it."""

import json
import re

from click.testing import CliRunner

from fastckpt._core.report.events import find
from fastckpt_run.cli import main
from tests.e2e.offload.conftest import PROGRAM
from tests.e2e.offload.test_page import assert_as_on_the_page
from tests.unit._core.report.schema import faults

MIB = 1 << 20


def events(path) -> list[dict]:
    found = [event for event in map(json.loads, path.read_text().splitlines()) if event["event"].startswith("offload_")]
    return sorted(found, key=lambda event: (event["rank"], event["time"]))


def test_gradients_of_a_job_are_bitwise_its_own_and_its_report_names_what_was_planned_and_what_came(new_job, scratch):
    # What is needed while it waits to be written is not written, and then less is than was planned.
    arguments = ("--steps", "4", "--memory", "1", "--compare", "--settle", "--offload", str(scratch))
    job = new_job().run(*arguments, program=PROGRAM)
    assert all((job.folder / f"end.{rank}").exists() for rank in (0, 1))
    document, text = (
        CliRunner().invoke(main, ["report", str(job.checkpoint_dir), *more], env={"COLUMNS": "400"})
        for more in (["--json"], [])
    )
    assert document.exit_code == text.exit_code == 0, document.output + text.output
    assert_as_on_the_page("fastckpt report run | grep -e offloading -e RANK -e scratch", text.output, scratch)
    found = json.loads(document.output)["offloaded"]
    assert [(one["rank"], one["forwards"], one["steps"]) for one in found] == [(0, 4, 3), (1, 4, 3)]
    for one in found:
        [last] = [line for line in job.log(one["rank"]) if "written" in line]
        assert one["directory"] == str(scratch) and one["budget"] == 8 * MIB and not one["ends"]
        assert (one["written"], one["read"]) == (last["written"], last["read"])
        assert one["planned_written"] == last["planned"] == one["step_written"]
        assert 0 < one["kept"] < one["saved"] - 30 * MIB and one["step_wait"] > 0
        assert one["waited_for_writes"] + one["waited_for_reads"] >= 3 * one["step_wait"] - 1e-6
    says = r"^offloading: activations of 2 ranks; a step writes (\S+ MB), planned \1, and waits "
    assert re.search(says, text.output, re.MULTILINE)
    [path] = find(str(job.checkpoint_dir))
    by_rank = events(path)
    assert not [fault for event in by_rank for fault in faults(event)]
    assert by_rank[0]["event"] == "offload_planned"
    assert len(by_rank) <= 2 * 4, "a plan, the first step that had one, perhaps one later, and the end"
    assert events(job.events) == by_rank, "each once in the file of --fast-events"
