"""One job that is watched by all means: what each of them says of it is the same, and true."""

import inspect
import json
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as classic

from fastckpt._core.report import goodput
from fastckpt._core.report.events import find, read
from fastckpt._core.report.metric_table import BY_NAME, METRICS, Kind, parse_key
from fastckpt_run.cli import main
from tests.e2e.watch.conftest import WatchedJob

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@cache
def parsed(kind: str, text: str) -> tuple[dict[str, Any], Samples]:
    """The families and the samples of an answer, as a reader of Prometheus understands them."""
    read_all = openmetrics if "openmetrics" in kind else classic
    families = {family.name: family for family in read_all(text)}
    samples = [sample for family in families.values() for sample in family.samples]
    return families, {(each.name, tuple(sorted(each.labels.items()))): each.value for each in samples}


def scrapes(job: WatchedJob) -> Iterator[Samples]:
    for _, kind, text in job.scrapes:
        yield parsed(kind, text)[1]


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


def check_both_formats_have_the_metrics_of_the_table_with_kind_unit_and_help(watched: WatchedJob):
    kinds = {"openmetrics" in kind for _, kind, _ in watched.scrapes}
    assert kinds == {True, False}
    for _, kind, text in watched.scrapes[-2:]:
        families = parsed(kind, text)[0]
        assert [*families] == [metric.family for metric in METRICS]
        for metric in METRICS:
            family = families[metric.family]
            assert (family.type, family.documentation) == (metric.kind.value, metric.help)
            assert family.unit == (metric.unit if "openmetrics" in kind else "")
            for sample in family.samples:
                assert metric.kind is Kind.HISTOGRAM or set(sample.labels) == set(metric.labels)


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


def check_what_a_loss_would_cost_follows_the_saves(watched: WatchedJob):
    for samples in scrapes(watched):
        if (key := ("fastckpt_unsaved_steps", (("tier", "storage"),))) in samples:
            memory = samples["fastckpt_unsaved_steps", (("tier", "memory"),)]
            assert 0 <= memory <= samples[key] <= samples["fastckpt_step", ()]
    newest = {tier: samples.get(("fastckpt_newest_step", (("tier", tier),)), 0) for tier in ("memory", "storage")}
    assert newest["memory"] >= newest["storage"] > 0 and newest["memory"] % 5 == newest["storage"] % 5 == 0


def check_values_of_the_script_arrive_by_name_and_rank_also_from_before_its_checkpointer(watched: WatchedJob, last):
    seen = {key: value for samples in scrapes(watched) for key, value in samples.items() if key[0] == "fastckpt_user"}
    found = {(dict(labels)["name"], dict(labels)["rank"]): value for (_, labels), value in seen.items()}
    names = ("before", "loss", "train/lr", "bad", "rank")
    assert found.keys() == {(name, rank) for name in names for rank in "01"}
    assert (found["before", "0"], found["before", "1"], found["rank", "1"]) == (1, 2, 1)
    assert math.isnan(found["bad", "0"]) and found["train/lr", "0"] == 0.01
    assert last["values"]['fastckpt_user{name="bad",rank="1"}'] == "NaN"
    assert last["values"]['fastckpt_user_step{rank="0"}'] <= last["step"]


def check_tensorboards_own_reader_finds_the_curves_of_each_start(watched: WatchedJob, last):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [run] = (watched.folder / "tensorboard").iterdir()
    found: dict[str, EventAccumulator] = {}
    for start in sorted(run.iterdir()):
        assert not [path for path in start.iterdir() if path.name.startswith(".")]
        found[start.name] = EventAccumulator(str(start))
        found[start.name].Reload()
    assert [*found] == ["start0", "start1"]
    tags = found["start1"].Tags()
    assert tags["histograms"] == ["job/step_seconds"]
    for key, value in last["values"].items():
        name, labels = parse_key(key)
        if name not in BY_NAME or name == "fastckpt_step_seconds":
            continue
        step, tag = last["step"], BY_NAME[name].tag(tuple(labels[each] for each in BY_NAME[name].labels))
        if name == "fastckpt_user":
            step = last["values"][f'fastckpt_user_step{{rank="{labels["rank"]}"}}']
            tag = labels["name"] if labels["rank"] == "0" else f"{labels['name']}/rank{labels['rank']}"
        elif name == "fastckpt_user_step":
            step = value
        point = found["start1"].Scalars(tag)[-1]
        assert point.step == step, tag
        assert point.value == pytest.approx(float(value), rel=1e-5, abs=1e-30, nan_ok=True), tag
    assert found["start1"].Scalars("job/step_seconds/mean")[-1].value > 0


def check_nothing_of_this_kept_the_job_from_its_good_end(watched: WatchedJob):
    assert "watching the job failed" not in watched.output, watched.output
    tracebacks = [line for line in watched.output.splitlines() if "Traceback" in line]
    assert all(line.startswith("[rank") for line in tracebacks), (
        watched.output
    )  # of the peer of the one that was killed


CHECKS = [check for name, check in globals().items() if name.startswith("check_")]


def test_all_means_of_watching_a_job_say_the_same_and_the_truth(watched: WatchedJob, request: pytest.FixtureRequest):
    """One test, whose job runs once: of several, workers of pytest would run it once each."""
    assert len(CHECKS) > 10
    for check in CHECKS:
        check(**{name: request.getfixturevalue(name) for name in inspect.signature(check).parameters})
