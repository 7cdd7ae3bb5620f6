"""One job that is watched by all means: what each of them says of it is the same, and true."""

import json
import math
import os
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from fastckpt._core.report import goodput
from fastckpt._core.report.events import find, read
from fastckpt._core.report.metric_table import BY_NAME, METRICS, Kind, parse_key
from fastckpt_run.cli import main
from tests.e2e.watch.conftest import WatchedAgent

STEPS, PAUSE = 60, 0.2
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(agent: WatchedAgent) -> Samples:
    """The samples of an answer, as a reader of Prometheus understands them."""
    samples = [s for family in text_string_to_metric_families(agent.ask("/metrics")[1]) for s in family.samples]
    return {(each.name, tuple(sorted(each.labels.items()))): each.value for each in samples}


def follow(agent: WatchedAgent, folder: Path) -> list[Samples]:
    """The samples of a job whose rank 1 is killed, in order, from before its first worker to its end."""
    found = [scrape(agent)]

    def reaches(step: int, restarts: int) -> bool:
        found.append(now := scrape(agent))
        is_as_far = now.get(("fastckpt_step", ()), 0) >= step and now["fastckpt_workers", ()] == 2
        return is_as_far and now["fastckpt_restarts_total", ()] == restarts

    with socket.create_connection(("127.0.0.1", urlsplit(agent.url).port)) as dead:
        dead.sendall(b"GET /metrics HTTP/1.0\r\n")  # it never ends its request, nor reads
        agent.until(lambda: reaches(STEPS // 3, 0), "the first steps", PAUSE)
        (folder / "kill").touch()
        agent.until(lambda: reaches(STEPS, 1), "steps after the restart", PAUSE)
        (folder / "stop").touch()
        assert agent.ends() == 0, agent.text()
    return found


def test_all_means_of_watching_a_job_say_the_same_and_the_truth(watch, tmp_path: Path) -> None:
    """One test, whose job runs once."""
    agent = watch("a", "--standalone", "--nproc-per-node=2", FASTCKPT_TENSORBOARD=str(tmp_path / "tensorboard"))
    scrapes = follow(agent, tmp_path)
    [log] = find(tmp_path / "run")
    events = [dict(event) for event in read(log).events]
    last = [event for event in events if event["event"] == "metrics"][-1]
    done = CliRunner().invoke(main, ["report", str(tmp_path / "run"), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)

    assert scrapes[0]["fastckpt_workers", ()] == 0 and scrapes[0]["fastckpt_steps_total", ()] == 0
    check_counters_never_fall(scrapes)
    check_the_last_values_are_those_of_the_report(events, last, report)
    check_names(last, report)
    check_values_of_the_script(scrapes, last)
    text = CliRunner().invoke(main, ["report", str(tmp_path / "run")]).output
    assert "step times: " in text and f"logged up to step {last['step']:,}: " in text and "bad NaN" in text
    [run] = (tmp_path / "tensorboard").iterdir()
    assert sorted(os.listdir(run)) == ["start0", "start1"]
    output = agent.text()
    assert "watching the job failed" not in output, output
    tracebacks = [line for line in output.splitlines() if "Traceback" in line]
    assert all(line.startswith("[rank") for line in tracebacks), output  # of the peer of the killed one


def check_counters_never_fall(scrapes: list[Samples]) -> None:
    """Nor does the histogram, though workers are restarted."""
    counted = tuple(metric.name for metric in METRICS if metric.kind is Kind.COUNTER)
    counted += tuple(f"fastckpt_step_seconds_{part}" for part in ("bucket", "count", "sum"))
    each = [{key: value for key, value in samples.items() if key[0] in counted} for samples in scrapes]
    for before, now in pairwise(each):
        assert before.keys() <= now.keys()
        assert not {key: (before[key], now[key]) for key in before if now[key] < before[key]}
    # steps of two ranks, of which the first of each start has no duration
    assert each[-1]["fastckpt_step_seconds_count", ()] >= 2 * (STEPS - 2)


def check_the_last_values_are_those_of_the_report(events: list[Any], last: dict[str, Any], report: Any) -> None:
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
    for name, count in (("saves", "saves"), ("persists", "persisted"), ("persisted_bytes", "persisted_bytes")):
        assert values[f"fastckpt_{name}_total"] == report["checkpoints"][count]
    assert values['fastckpt_failures_total{kind="died"}'] == len(report["failures"]) == 1
    assert (values["fastckpt_restarts_left"], values["fastckpt_restarts_total"]) == (2, 1)


def check_names(last: dict[str, Any], report: Any) -> None:
    """The report has the last event, and events have names of the table alone."""
    [measured] = report["metrics"]
    assert (measured["node"], measured["step"], measured["values"]) == (0, last["step"], last["values"])
    steps = {f"fastckpt_step_seconds{end}" for end in ("", "_count", "_sum")}
    names = {parse_key(key)[0] for key in last["values"]}
    assert names - steps <= BY_NAME.keys() and steps <= names


def check_values_of_the_script(scrapes: list[Samples], last: dict[str, Any]) -> None:
    """They arrive by name and rank, also from before its checkpointer."""
    seen = {key: value for samples in scrapes for key, value in samples.items() if key[0] == "fastckpt_user"}
    found = {(dict(labels)["name"], dict(labels)["rank"]): value for (_, labels), value in seen.items()}
    assert found.keys() == {(name, rank) for name in ("before", "loss", "train/lr", "bad", "rank") for rank in "01"}
    assert (found["before", "0"], found["before", "1"], found["rank", "1"]) == (1, 2, 1)
    assert math.isnan(found["bad", "0"]) and found["train/lr", "0"] == 0.01
    assert last["values"]['fastckpt_user{name="bad",rank="1"}'] == "NaN"
    assert last["values"]['fastckpt_user_step{rank="0"}'] <= last["step"]
