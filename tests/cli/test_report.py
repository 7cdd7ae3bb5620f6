"""`fastckpt report`: while a job runs, after a kill, of files that are no log; and the page of any log."""

import json
import os
import re
import socket
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fastckpt._core.report.events import FOLDER
from fastckpt_run.views.chart import Axis, Bar, lane
from tests.cli.test_docs import RECORDED, leave_log

EVIL = "</title></style><script>alert(1)</script>\"'><img src=x onerror=y>&amp;\x1b[31m\u202e"
EVENTS = [json.loads(line) for line in RECORDED.read_text().splitlines()]


class Page(HTMLParser):
    """Refuses what is not well-formed; keeps what could reach out of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.attributes, self.text = list[str](), set[str](), set[str](), list[str]()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in ("meta", "br", "img", "input", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


UNSAFE = {*["script", "img", "iframe", "object", "embed", "link", "form", "input", "a", "base", "foreignobject", "use"]}
"""Tags that could load or run something, or lead elsewhere."""


def assert_safe(text: str) -> str:
    """Check a page; returns the text that it shows."""
    found = Page(text)
    assert not found.tags & UNSAFE and not [name for name in found.attributes if re.match("on|src|href|action", name)]
    assert "http:" not in text and "https:" not in text and "@import" not in text
    assert set(re.findall(r"url\(.", text)) == {"url(#"}, "patterns of the page itself"
    return " ".join(found.text)


def write(path: Path, events: Sequence[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, events)))
    return path


def test_the_report_page_has_the_numbers_of_the_log(fastckpt, directory, tmp_path):
    (directory / ".fastckpt").mkdir(parents=True)
    leave_log(directory)
    said = fastckpt("report", directory, "--html", tmp_path / "page.html", "--json")
    assert said.code == 0 and said.document["goodput"] == pytest.approx(0.646, abs=0.001)
    text = (tmp_path / "page.html").read_text()
    shown = assert_safe(text)
    for figure in (
        "64.60 %", "25.3 s", "rank 1 died: SIGKILL", "step 689, memory", "starting workers", socket.gethostname(),
        "How often it saves", "profiling: nothing is known", "a time, or failures, ask for it", "3.14 % of training",
    ):  # fmt: skip
        assert figure in shown
    assert len(text) < 200_000
    assert set(re.findall(r"url\(#([\w-]+)\)", text)) == set(re.findall(r'<pattern id="([\w-]+)"', text))


def test_report_of_a_file_that_is_no_log_has_no_launch(fastckpt, tmp_path):
    for content in (b"", b"\0" * 5000, b'{"event": "saved", "time": 1, "pid": 1}\n'):
        (tmp_path / "events").write_bytes(content)
        said = fastckpt("report", tmp_path / "events", "--json", "--html", tmp_path / "page")
        assert said.document["goodput"] is None and said.document["launches"] == [] and said.document["total"] == 0
        assert_safe((tmp_path / "page").read_text())
    (tmp_path / "events").write_bytes(RECORDED.read_bytes()[:-20] + b"\0" * 20)  # a torn one has those before
    said = fastckpt("report", tmp_path / "events", "--json")
    assert said.document["unreadable"] == 1 and said.document["launches"][0]["outcome"] is None
    assert sum(said.document["time"].values()) == pytest.approx(said.document["total"])
    assert "1 lines of the logs cannot be read" in fastckpt("report", tmp_path / "events").out


def test_uploads_copies_failures_and_a_later_launch_are_in_text_page_and_json(fastckpt, tmp_path):
    same = {name: EVENTS[-2][name] for name in ("time", "monotonic", "pid")}
    uploaded = {"event": "uploaded", "bytes": 9, "seconds": 1.0}
    copied = {"event": "replicated", "history": 1, "bytes": 10**6, "seconds": 0.1, "to": "node1"}
    later = {"place": "/runs/one", "history": 3, "holder": "process 7 on other"}
    why = {"exception": "ValueError: \x1b[1m<b>", "frame": "step (train.py:57)", "host": "node7"}
    why |= {"log": "logs/1/stderr.log", "restarts_left": 2, "restarts": 3}
    more = [
        uploaded | {"history": 1, "step": 1500, "remote": "s3://b/r"},
        {"event": "upload_failed", "attempt": 1, "error": "no route"},
        uploaded | {"step": 1700},
        copied | {"step": 20},
        copied | {"step": 30},
        {"event": "replica_skipped", "history": 1, "step": 40, "bytes": 10**6, "reason": "no room"},
        {"event": "fetched", "history": 1, "step": 30, "bytes": 5 * 10**6, "kept": 7, "seconds": 0.1},
        {"event": "superseded", **later},
    ]
    events = [*EVENTS[:-2], *(each | same for each in more), *EVENTS[-2:]]
    death = next(number for number, event in enumerate(events) if event["event"] == "worker_died")
    events.insert(death + 1, events[death] | {"event": "worker_failed", "exitcode": 1} | why)
    log = write(tmp_path / "log", events)
    document = fastckpt("report", log, "--html", tmp_path / "page", "--json").document
    counts = document["checkpoints"]
    assert (counts["uploads"], counts["upload_failures"], counts["newest_upload"]) == (2, 1, [1, 1500])
    assert (counts["copied"], counts["copied_bytes"], counts["copies_skipped"]) == (2, 2 * 10**6, 1)
    assert (counts["newest_copied"], counts["fetched_bytes"]) == ([1, 30], 5 * 10**6)
    assert document["superseded"] == [{"node": 0, "at": pytest.approx(same["time"], abs=1.0), **later}]
    assert {name: document["failures"][0][name] for name in why} == why
    assert fastckpt("report", log, "--html", tmp_path / "page").out.startswith("written to ")
    text = fastckpt("report", log).out
    shown = assert_safe((tmp_path / "page").read_text())
    assert "uploads: 2; 1 attempts failed; the newest that arrived is step 1,500" in text
    assert (
        "copies on other hosts: 2 saves, 2.0 MB in all; 1 skipped; the newest that all nodes have made is step 30; "
        "5.0 MB brought back" in text
    )
    assert "superseded in /runs/one at 20" in text and "\x1b" not in text
    for told in ("history 3 is that of process 7 on other", "ValueError: ", why["frame"], f"node7, log {why['log']}"):
        assert told in text and told in shown


def test_report_without_a_log_is_an_error_that_names_it(fastckpt, tmp_path):
    for number, make in enumerate((None, Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name))):
        log = tmp_path / str(number) / FOLDER / "000001-host-7.jsonl"
        log.parent.mkdir(parents=True)
        if make:
            make(log)
        said = fastckpt("report", tmp_path / str(number))
        assert said.code == 2 and (str(log) in said.err if make else "has no event log" in said.err)
    assert fastckpt("report", RECORDED, "--html", tmp_path / "none" / "page").code == 2


def test_many_restarts_do_not_hide_where_most_of_the_time_went():
    """Two thousand, of a second each, in a month."""
    bars = []
    for begin in range(0, 2000 * 1300, 1300):
        bars += [Bar(begin + i, begin + i + 1, kind) for i, kind in enumerate(("stop", "start", "resume"))]
        bars.append(Bar(begin + 3, begin + 1300, "useful"))
    axis, widths = Axis(0, 2000 * 1300), dict.fromkeys(("stop", "start", "resume", "useful"), 0.0)
    for kind, width in re.findall(r'class="(\w+)" x="[-\d.]+" width="([-\d.]+)"', lane(bars, axis)):
        widths[kind] += float(width)
    assert widths.pop("useful") > 1900 and sum(widths.values()) < 100
    for length in (0, 3600 * 10**9, 10**21):
        ticks = Axis(5, 5 + length).ticks(6)
        assert 1 <= len(ticks) <= 7 and ticks[-1][0] <= max(1, length)


VALUES = st.none() | st.integers() | st.floats() | st.text(max_size=8) | st.just(EVIL)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([(line, field, EVIL) for line in range(len(EVENTS)) for field in range(2, 12)])
@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 12), VALUES), max_size=30))
def test_any_sequence_of_events_makes_a_report_page(fastckpt, tmp_path, changes):
    events = [*map(dict, EVENTS)]
    for line, field, value in changes:
        event = events[line % len(events)]
        event[list(event)[field % len(event)]] = value
    log = write(tmp_path / EVIL.replace("/", "|"), events)
    for options in ([], ["--json", "--html", tmp_path / "page"]):
        said = fastckpt("report", log, *options)
        assert said.code == 0 and "\x1b" not in said.out, said.err
    assert_safe((tmp_path / "page").read_text())
