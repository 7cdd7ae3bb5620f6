"""One job that is watched by all means: what each of them says of it is the same, and true."""

import inspect
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from fastckpt._core.report import goodput
from fastckpt._core.report.events import find, read
from fastckpt._core.report.metric_table import BY_NAME, METRICS, Kind, parse_key
from fastckpt_run.cli import main
from tests.e2e.watch.conftest import WatchedJob

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrapes(job: WatchedJob) -> Iterator[Samples]:
    """The samples of each answer, as a reader of Prometheus understands them."""
    for text in job.scrapes:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        yield {(each.name, tuple(sorted(each.labels.items()))): each.value for each in samples}


@pytest.fixture
def events(watched: WatchedJob) -> list[dict[str, Any]]:
    [path] = find(watched.checkpoints)
    return [dict(event) for event in read(path).events]


@pytest.fixture
def last(events) -> dict[str, Any]:
    return [event for event in events if event["event"] == "metrics"][-1]


@pytest.fixture
def report(watched: WatchedJob) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["report", str(watched.checkpoints), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def check_the_page_answers_before_the_first_worker_and_during_the_restart(watched: WatchedJob):
    first = next(scrapes(watched))
    assert first["fastckpt_workers", ()] == 0 and first["fastckpt_steps_total", ()] == 0
    assert [*scrapes(watched)][-1]["fastckpt_restarts_total", ()] == 1


def check_counters_and_the_histogram_never_fall_though_workers_are_restarted(watched: WatchedJob):
    before: Samples = {}
    counted = tuple(metric.name for metric in METRICS if metric.kind is Kind.COUNTER)
    counted += tuple(f"fastckpt_step_seconds_{part}" for part in ("bucket", "count", "sum"))
    for samples in scrapes(watched):
        now = {key: value for key, value in samples.items() if key[0] in counted}
        assert before.keys() <= now.keys()
        assert not {key: (before[key], now[key]) for key in before if now[key] < before[key]}
        before = now
    # 120 steps of two ranks, of which the first of each start has no duration
    assert before["fastckpt_step_seconds_count", ()] >= 2 * (120 - 2)


def check_the_last_values_are_those_of_the_report(watched: WatchedJob, events, last, report):
    values, begin = last["values"], events[0]["monotonic"]
    for cause in set(goodput.CAUSES) - {goodput.USEFUL, goodput.END}:  # which goes on until the very end
        key = BY_NAME["fastckpt_lost_seconds_total"].key((cause,))
        assert values[key] == pytest.approx(report["time"][cause], rel=1e-4, abs=1e-5), cause
    assert values["fastckpt_useful_seconds_total"] == pytest.approx(report["time"]["useful"], rel=1e-4)
    useful = report["time"]["useful"] / (last["monotonic"] - begin)
    assert values["fastckpt_goodput_ratio"] == pytest.approx(useful, rel=1e-3)
    rest = events[-1]["monotonic"] - last["monotonic"]
    assert report["goodput"] == pytest.approx(useful * (report["total"] - rest) / report["total"], rel=1e-3)
    assert values["fastckpt_steps_total"] == report["steps"]["new"]
    assert values["fastckpt_repeated_steps_total"] == report["steps"]["repeated"]
    counts = report["checkpoints"]
    for name, count in (("saves", "saves"), ("persists", "persisted"), ("persisted_bytes", "persisted_bytes")):
        assert values[f"fastckpt_{name}_total"] == counts[count]
    assert values['fastckpt_failures_total{kind="died"}'] == len(report["failures"]) == 1
    assert (values["fastckpt_restarts_left"], values["fastckpt_restarts_total"]) == (2, 1)


def check_the_report_has_the_last_event_and_events_have_names_of_the_table_alone(watched: WatchedJob, last, report):
    [measured] = report["metrics"]
    assert (measured["node"], measured["step"], measured["values"]) == (0, last["step"], last["values"])
    steps = {f"fastckpt_step_seconds{end}" for end in ("", "_count", "_sum")}
    names = {parse_key(key)[0] for key in last["values"]}
    assert names - steps <= BY_NAME.keys() and steps <= names
    text = CliRunner().invoke(main, ["report", str(watched.checkpoints)]).output
    assert "step times: " in text and f"logged up to step {last['step']:,}: " in text and "bad NaN" in text


def check_values_of_the_script_arrive_by_name_and_rank_also_from_before_its_checkpointer(watched: WatchedJob, last):
    seen = {key: value for samples in scrapes(watched) for key, value in samples.items() if key[0] == "fastckpt_user"}
    found = {(dict(labels)["name"], dict(labels)["rank"]): value for (_, labels), value in seen.items()}
    names = ("before", "loss", "train/lr", "bad", "rank")
    assert found.keys() == {(name, rank) for name in names for rank in "01"}
    assert (found["before", "0"], found["before", "1"], found["rank", "1"]) == (1, 2, 1)
    assert math.isnan(found["bad", "0"]) and found["train/lr", "0"] == 0.01
    assert last["values"]['fastckpt_user{name="bad",rank="1"}'] == "NaN"
    assert last["values"]['fastckpt_user_step{rank="0"}'] <= last["step"]


def check_tensorboard_has_a_run_of_each_start(watched: WatchedJob):
    [run] = (watched.folder / "tensorboard").iterdir()
    assert sorted(start.name for start in run.iterdir()) == ["start0", "start1"]


def check_nothing_of_this_kept_the_job_from_its_good_end(watched: WatchedJob):
    assert "watching the job failed" not in watched.output, watched.output
    tracebacks = [line for line in watched.output.splitlines() if "Traceback" in line]
    assert all(line.startswith("[rank") for line in tracebacks), watched.output  # of the peer of the killed one


CHECKS = [check for name, check in globals().items() if name.startswith("check_")]


def test_all_means_of_watching_a_job_say_the_same_and_the_truth(watched: WatchedJob, request: pytest.FixtureRequest):
    """One test, whose job runs once: of several, workers of pytest would run it once each."""
    assert len(CHECKS) == 7
    for check in CHECKS:
        check(**{name: request.getfixturevalue(name) for name in inspect.signature(check).parameters})
