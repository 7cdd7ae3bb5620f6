"""`fastckpt report`: while a job runs, after a kill, of files that are no log; and the page of any log."""

import json
import os
import re
import socket
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastckpt._core.report.events import FOLDER, parsed
from fastckpt._core.report.report import report
from fastckpt_run import formatting
from fastckpt_run.views.chart import Axis, Bar, lane
from fastckpt_run.views.page import page
from tests.cli.conftest import Fastckpt
from tests.cli.test_docs import RECORDED, leave_log
from tests.unit._core.report.stories import Story

EVIL = "</title></style><script>alert(1)</script>\"'><img src=x onerror=y>&amp;\x1b[31m\u202e"
VOID = {"meta", "rect", "br", "img", "input", "link"}


class Page(HTMLParser):
    """Refuses what is not well-formed; keeps what could reach out of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        raise AssertionError(f"<{tag}/>")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


SAFE_TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "section", "div", "span", "p", "b", "i"),
    *("ul", "li", "svg", "rect", "pattern", "path", "table", "thead", "tbody", "tr", "th", "td"),
}
SAFE_ATTRIBUTES = {
    *("lang", "charset", "name", "content", "http-equiv", "class", "style", "viewbox", "preserveaspectratio"),
    *("aria-hidden", "x", "width", "height", "scope", "id", "d", "patternunits"),
}


def assert_safe(text: str) -> Page:
    found = Page(text)
    assert found.tags <= SAFE_TAGS and found.attributes <= SAFE_ATTRIBUTES
    assert "http:" not in text and "https:" not in text and "@import" not in text
    assert set(re.findall(r"url\(.", text)) == {"url(#"}, "patterns of the page itself"
    return found


def test_the_report_page_has_the_numbers_of_the_log(fastckpt: Fastckpt, directory: Path, tmp_path: Path):
    directory.mkdir()
    (directory / ".fastckpt").mkdir()
    leave_log(directory)
    said = fastckpt("report", directory, "--html", tmp_path / "page.html", "--json")
    assert said.code == 0 and said.document["goodput"] == pytest.approx(0.646, abs=0.001)
    text = (tmp_path / "page.html").read_text()
    shown = " ".join(assert_safe(text).text)
    for figure in (
        "64.60 %", "25.3 s", "rank 1 died: SIGKILL", "step 689, memory", "starting workers",
        socket.gethostname(),
        "How often it saves", "profiling: nothing is known", "a time, or failures, ask for it", "3.14 % of training",
    ):  # fmt: skip
        assert figure in shown
    assert len(text) < 200_000


def test_repeated_work_is_hatched_also_in_the_legend(fastckpt: Fastckpt, tmp_path: Path):
    """Its red and the green of useful work are alike to one man in twelve."""
    fastckpt("report", RECORDED, "--html", tmp_path / "page")
    text = (tmp_path / "page").read_text()
    assert 'class="repeated"' in text and '<i class="repeated"></i>' in text
    for rule in re.findall(r"^ *(?:i|rect)?\.repeated {.*?}", text, re.MULTILINE):
        assert "url(#hatch" in rule or "repeating-linear-gradient" in rule
    assert set(re.findall(r"url\(#([\w-]+)\)", text)) == set(re.findall(r'<pattern id="([\w-]+)"', text))


def test_report_reads_a_log_by_its_name_and_a_torn_one(fastckpt: Fastckpt, tmp_path: Path):
    whole = RECORDED.read_bytes()
    (tmp_path / "events").write_bytes(whole[:-20])
    said = fastckpt("report", tmp_path / "events", "--json")
    assert said.document["unreadable"] == 1 and said.document["launches"][0]["outcome"] is None
    assert sum(said.document["time"].values()) == pytest.approx(said.document["total"])
    assert "1 lines of the logs cannot be read" in fastckpt("report", tmp_path / "events").out


@pytest.mark.parametrize("content", [b"", b"\0" * 5000, b"not json\n", b'{"event": "saved", "time": 1, "pid": 1}\n'])
def test_report_of_a_file_that_is_no_log_is_an_error(fastckpt: Fastckpt, tmp_path: Path, content: bytes):
    (tmp_path / "events").write_bytes(content)
    said = fastckpt("report", tmp_path / "events", "--json", "--html", tmp_path / "page")
    assert said.document["goodput"] is None and said.document["launches"] == [] and said.document["total"] == 0
    assert_safe((tmp_path / "page").read_text())
    assert "no launch of fastckpt-run" in fastckpt("report", tmp_path / "events").out


def test_failed_uploads_are_in_the_report(fastckpt: Fastckpt, tmp_path: Path):
    same = {"time": 1795264987.0, "monotonic": 46537.0, "pid": 22365}
    events = [
        {"event": "uploaded", "history": 1, "step": 1500, "bytes": 9, "seconds": 1.0, "remote": "s3://b/r"},
        {"event": "upload_failed", "attempt": 1, "error": "no route"},
        {"event": "uploaded", "step": 1700, "bytes": 9, "seconds": 1.0},
        {"event": "upload_failed", "attempt": 2, "error": "no route"},
    ]
    recorded = Path(RECORDED).read_text().splitlines()
    lines = [*recorded[:-2], *(json.dumps(event | same) for event in events), *recorded[-2:]]
    (tmp_path / "log").write_text("\n".join(lines))
    counts = fastckpt("report", tmp_path / "log", "--json").document["checkpoints"]
    assert (counts["uploads"], counts["upload_failures"], counts["newest_upload"]) == (2, 2, [1, 1500])
    assert "uploads: 2; 2 attempts failed; the newest that arrived is step 1,500" in fastckpt(
        "report", tmp_path / "log"
    ).out  # fmt: skip


def test_copies_on_other_hosts_are_in_the_report(fastckpt: Fastckpt, tmp_path: Path):
    same = {"time": 1795264987.0, "monotonic": 46537.0, "pid": 22365}
    copied = {"event": "replicated", "history": 1, "bytes": 10**6, "seconds": 0.1, "to": "node1"}
    events = [
        copied | {"step": 20},
        copied | {"step": 30},
        {"event": "replica_skipped", "history": 1, "step": 40, "bytes": 10**6, "reason": "no room"},
        {"event": "fetched", "history": 1, "step": 30, "bytes": 5 * 10**6, "kept": 7, "seconds": 0.1},
    ]
    recorded = Path(RECORDED).read_text().splitlines()
    lines = [*recorded[:-2], *(json.dumps(event | same) for event in events), *recorded[-2:]]
    (tmp_path / "log").write_text("\n".join(lines))
    counts = fastckpt("report", tmp_path / "log", "--json").document["checkpoints"]
    assert (counts["copied"], counts["copied_bytes"], counts["copies_skipped"]) == (2, 2 * 10**6, 1)
    assert (counts["newest_copied"], counts["fetched_bytes"]) == ([1, 30], 5 * 10**6)
    said = "copies on other hosts: 2 saves, 2.0 MB in all; 1 skipped; the newest that all nodes have made is step 30; "
    assert said + "5.0 MB brought back" in fastckpt("report", tmp_path / "log").out


def test_a_superseded_launch_is_named_in_the_report(fastckpt: Fastckpt, tmp_path: Path):
    recorded = Path(RECORDED).read_text().splitlines()
    same = {name: json.loads(recorded[-2])[name] for name in ("time", "monotonic", "pid")}
    said = {"place": "/runs/one", "history": 3, "holder": "process 7 on other"}
    lines = [*recorded[:-2], json.dumps({"event": "superseded", **said, **same}), *recorded[-2:]]
    (tmp_path / "log").write_text("\n".join(lines))
    [one] = fastckpt("report", tmp_path / "log", "--json").document["superseded"]
    assert one == {"node": 0, "at": pytest.approx(same["time"], abs=1.0), **said}
    text = fastckpt("report", tmp_path / "log").out
    assert "superseded in /runs/one at 20" in text and " UTC: history 3 is that of process 7 on other" in text
    fastckpt("report", tmp_path / "log", "--html", tmp_path / "page")
    assert "history 3 is that of process 7 on other" in (tmp_path / "page").read_text()


def test_report_without_a_log_is_an_error(fastckpt: Fastckpt, directory: Path, tmp_path: Path):
    directory.mkdir()
    said = fastckpt("report", directory)
    assert said.code == 2 and "has no event log" in said.err and "--fast-events" in said.err
    os.mkfifo(tmp_path / "pipe")
    (directory / FOLDER).mkdir(parents=True)
    os.mkfifo(directory / FOLDER / "000001-host-1.jsonl")
    assert fastckpt("report", directory).code == 2
    assert fastckpt("report", RECORDED, "--html", tmp_path / "none" / "page").code == 2


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name)])
def test_a_log_that_is_no_file_is_an_error_that_names_it(fastckpt: Fastckpt, tmp_path: Path, make):
    log = tmp_path / FOLDER / "000001-host-7.jsonl"
    log.parent.mkdir(parents=True)
    make(log)
    said = fastckpt("report", tmp_path)
    assert said.code == 2 and str(log) in said.err


def test_hostile_texts_in_a_log_are_escaped_on_the_page(fastckpt: Fastckpt, tmp_path: Path):
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    for event in lines:
        for name, value in event.items():
            if isinstance(value, str) and name not in ("event", "directory"):
                event[name] = EVIL
    path = tmp_path / f"{EVIL.replace('/', '|')}"
    path.write_text("\n".join(map(json.dumps, lines)))
    said = fastckpt("report", path, "--html", tmp_path / "page")
    assert said.code == 0 and "\x1b" not in said.out
    shown = assert_safe((tmp_path / "page").read_text())
    assert any("alert(1)" in text for text in shown.text)
    assert "\x1b" not in fastckpt("report", path).out


def test_a_long_job_makes_a_small_page():
    """A month, ten thousand records and persists, a hundred failures."""
    story = Story(ranks=8).starts(1, 2, 3, 4).loads(5, 1)
    for number in range(1, 10_001):
        story.trains(5 + number * 250, number * 100, stalled=number)
        story.at(5 + number * 250, "persisted", step=number, bytes=10**9, seconds=20)
        if number % 100 == 0:
            story.dies(6 + number * 250).stops(7 + number * 250)
            at = 8 + number * 250
            story.starts(at, at, at, at).loads(at + 1, 1, step=number)
    text = page(report([story.log]), "run")
    assert_safe(text)
    assert len(text) < 3_000_000


def test_many_restarts_do_not_hide_where_most_of_the_time_went():
    """Two thousand, of a second each, in a month."""
    bars = []
    for number in range(2000):
        begin = number * 1300
        bars += [Bar(begin + i, begin + i + 1, kind) for i, kind in enumerate(("stop", "start", "resume"))]
        bars.append(Bar(begin + 3, begin + 1300, "useful"))
    widths = dict.fromkeys(("stop", "start", "resume", "useful"), 0.0)
    for kind, width in re.findall(r'class="(\w+)" x="[-\d.]+" width="([-\d.]+)"', lane(bars, Axis(0, 2000 * 1300))):
        widths[kind] += float(width)
    assert widths["useful"] > 1900 and widths["stop"] + widths["start"] + widths["resume"] < 100


VALUES = st.none() | st.integers() | st.floats() | st.text(max_size=8) | st.just(EVIL)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 12), VALUES), max_size=30))
def test_any_sequence_of_events_makes_a_report_page(fastckpt: Fastckpt, tmp_path: Path, changes):
    events = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    for line, field, value in changes:
        event = events[line % len(events)]
        event[list(event)[field % len(event)]] = value
    (tmp_path / "log").write_text("\n".join(map(json.dumps, events)))
    for options in (["--json"], [], ["--html", tmp_path / "page"]):
        said = fastckpt("report", tmp_path / "log", *options)
        assert said.code == 0, said.err
    assert_safe((tmp_path / "page").read_text())


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (None, "?"), (0, "0 ms"), (1_234_567, "1.23 ms"), (999_400_000, "999 ms"), (999_900_000, "1.00 s"),
        (12_345_000_000, "12.3 s"), (99_949_000_000, "99.9 s"), (100 * 10**9, "1 min 40 s"),
        (5999 * 10**9, "99 min 59 s"), (7200 * 10**9, "2 h"), (6000 * 10**9, "1 h 40 min"),
        (359_999 * 10**9, "99 h 59 min"), (360_000 * 10**9, "4 d 4 h"),
    ],
)  # fmt: skip
def test_durations_in_the_report_have_fitting_units(nanoseconds: int | None, text: str):
    assert formatting.duration(nanoseconds) == text


@pytest.mark.parametrize(("number", "text"), [(0.01234, "0.0123"), (45, "45"), (999.6, "1,000"), (12345.6, "12,346")])
def test_rates_in_the_report_have_fitting_units(number: float, text: str):
    assert formatting.rate(number) == text


@pytest.mark.parametrize("length", [0, 1, 10**6, 10**9, 3600 * 10**9, 86400 * 10**9, 10**18, 10**21])
def test_the_time_axis_of_the_report_has_few_ticks(length: int):
    axis = Axis(5, 5 + length)
    assert 1 <= len(axis.ticks(6)) <= 7 and axis.ticks(6)[-1][0] <= max(1, length)


@given(st.lists(st.tuples(st.integers(-50, 2000), st.integers(0, 500)), max_size=20), st.integers(0, 1000))
def test_bars_of_the_report_stay_within_their_row(bars, length):
    drawn = lane([Bar(begin, begin + width, "useful") for begin, width in bars], Axis(0, length))
    for x, width in re.findall(r'x="([-\d.]+)" width="([-\d.]+)"', drawn):
        assert float(x) >= 0 and float(width) >= 0 and float(x) + float(width) <= 2001


def test_an_empty_log_makes_a_report_page():
    assert_safe(page(report([parsed(Path("log"), [])]), EVIL))


def test_the_reason_of_a_worker_failure_is_in_text_page_and_json(fastckpt: Fastckpt, tmp_path: Path):
    lines = []
    for line in RECORDED.read_text().splitlines():
        lines.append(line)
        event = json.loads(line)
        if event["event"] == "worker_died":
            why = {"exitcode": 1, "exception": "ValueError: \x1b[1m<b>", "frame": "step (train.py:57)", "host": "node7"}
            said = {"rank": event["rank"], "log": "logs/1/stderr.log", "restarts_left": 2, "restarts": 3}
            lines.append(json.dumps(event | {"event": "worker_failed"} | why | said))
    path = tmp_path / "events"
    path.write_text("\n".join(lines))
    said = fastckpt("report", path, "--html", tmp_path / "page", "--json")
    [one, *_] = said.document["failures"]
    assert [one[name] for name in ("frame", "host", "log")] == ["step (train.py:57)", "node7", "logs/1/stderr.log"]
    assert (one["exception"], one["restarts_left"], one["restarts"]) == ("ValueError: \x1b[1m<b>", 2, 3)
    text, shown = fastckpt("report", path).out, " ".join(assert_safe((tmp_path / "page").read_text()).text)
    for place in (text, shown):
        assert "ValueError: " in place and "step (train.py:57)" in place and "node7, log logs/1/stderr.log" in place
    assert "\x1b" not in text
