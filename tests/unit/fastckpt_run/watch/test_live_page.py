"""The live page over real servers of agents: who may see and do what, nodes that are gone, names that are hostile."""

import base64
import contextlib
import hashlib
import json
import os
import re
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from fastckpt._core import metrics
from fastckpt_run.torchrun_patches import SIGNAL_HANDLER
from fastckpt_run.views import live_view, top_text
from fastckpt_run.views.event_text import lines
from fastckpt_run.watch import job_actions, job_view
from fastckpt_run.watch.http_server import HttpServer
from fastckpt_run.watch.job_actions import JobActions
from fastckpt_run.watch.job_view import newest, settled
from fastckpt_run.watch.live_page import REFUSED, LivePage
from fastckpt_run.watch.node_status import STATUS
from tests.cli.test_report import Page
from tests.support.waits import until
from tests.unit._core.report.stories import WALL, Story
from tests.unit.fastckpt_run.watch.test_node_channel import Agents

HOSTILE = """<script>alert(1)</script>"'&<img src=x onerror=alert(2)>\x1b[31m\x07"""


def line(name, **fields):
    return metrics.to_line(metrics.stamp(name) | fields)


def status_of(rank, **more):
    worker = {"rank": rank, "local_rank": 0, "pid": 100 + rank, "doing": "takes steps", "step": 7, "steps": 7}
    return {"host": f"host{rank}", "workers": [{**worker, "silent": 0.1, "restarts": 0, **more}], "tiers": []}


class Served:
    """The pages of agents that are in one round, each with a server of its own."""

    def __init__(self, count, stack, lines=(), **more):
        self.agents = Agents(count, stack)
        self.pages = [
            LivePage(channel, saver, JobActions(channel, saver), list(lines))
            for channel, saver in zip(self.agents.channels, self.agents.savers, strict=True)
        ]
        for rank, channel in enumerate(self.agents.channels):
            channel.answer(STATUS, lambda sender, body, rank=rank: status_of(rank, **more))
        self.servers = [stack.enter_context(contextlib.closing(HttpServer("0", page.pages))) for page in self.pages]
        for page, server in zip(self.pages, self.servers, strict=True):
            page.serve_at(server.host, server.url)

    def ask(self, node, path, token=None, body=None, **headers):
        given = {} if token is None else {"X-Fastckpt-Token": token}
        method, url = "GET" if token is None else "POST", self.servers[node].url + path
        request = urllib.request.Request(url, body, method=method, headers=given | headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode(), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode(), error.headers

    def status(self):
        return json.loads(self.ask(0, "/status.json")[1])


@pytest.fixture(autouse=True)
def now(monkeypatch):
    """Each look makes a new view."""
    monkeypatch.setattr(job_view, "FRESH", -1.0)
    monkeypatch.setattr(job_view, "SHARE", 1e9)


LINES = [line("job_started", script="train.py", host="host0"), line("workers_started")]


@pytest.fixture(scope="module")
def nodes():
    """For tests that leave them as they were."""
    with contextlib.ExitStack() as stack:
        served = Served(3, stack, LINES)
        for node in (1, 2):
            served.ask(node, "/")  # over connections that are kept from then on
        yield served


@pytest.fixture
def own_nodes():
    with contextlib.ExitStack() as stack:
        yield Served(3, stack, LINES)


# --- who shows what


def test_the_first_node_shows_all_parts_under_a_strict_policy_and_the_others_say_where(nodes):
    found = nodes.status()
    assert [node["workers"][0]["rank"] for node in found["nodes"]] == [0, 1, 2] and found["job"]["state"] == "trains"
    for node in (1, 2):
        code, text, _ = nodes.ask(node, "/")
        assert code == 421 and f"This is node {node}" in text and f'href="{nodes.servers[0].url}"' in text
        assert nodes.ask(node, "/live")[0] == nodes.ask(node, "/status.json")[0] == 421
    code, text, headers = nodes.ask(0, "/")
    assert code == 200 and all(f"host{rank}" in text for rank in range(3))
    policy = dict(rule.strip().split(" ", 1) for rule in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[rule] == f"'sha256-{digest}'"
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)
    assert set(re.findall(r"url\(#([\w-]+)\)", text)) == set(re.findall(r'<pattern id="([\w-]+)"', text))
    assert f'<noscript><meta http-equiv="refresh" content="{live_view.RELOAD}"></noscript>' in text
    assert tuple(json.loads(nodes.ask(0, "/live")[1])["parts"]) == live_view.ORDER
    assert re.findall(r'data-part="(\w+)"', text) == list(live_view.ORDER)


def test_who_hears_whom_for_which_hosts_a_job_waits_and_which_node_does_not_answer_is_shown(own_nodes):
    """On the page and by `fastckpt top`, which also reads what agents of older versions say."""
    waits = "2 of 3 nodes have come to host0:29400, waiting for host2"
    own_nodes.pages[0]._views._links = SimpleNamespace(unheard=lambda: [(1, 2)], awaited=lambda: waits)
    found = own_nodes.status()
    assert found["links"] == {"unheard": [[1, 2]], "awaited": waits}
    told = "node 1 host1 does not hear node 2 host2, which answers others"
    page = own_nodes.ask(0, "/")[1]
    assert waits in page and told in page and '<span class="trouble">no</span>' in page
    shown = list(top_text.blocks(found))
    assert waits in shown and told in shown
    (matrix,) = (each for each in shown if not isinstance(each, str) and each.columns[0] == "HEARS")
    assert matrix.columns == ["HEARS", "0", "1", "2"]
    assert matrix.rows == [["0 host0", "", "yes", "yes"], ["1 host1", "yes", "", "no"], ["2 host2", "yes", "yes", ""]]
    assert told not in list(top_text.blocks({name: value for name, value in found.items() if name != "links"}))
    own_nodes.agents.savers[1]._peers.close()
    assert [node["answers"] for node in own_nodes.status()["nodes"]] == [True, False, True]
    assert "does not answer" in own_nodes.ask(0, "/")[1]
    own_nodes.agents.savers[0]._peers.close()
    code, text, _ = own_nodes.ask(2, "/")
    assert code == 421 and "node 0, which does not answer" in text


def test_nodes_are_asked_only_when_somebody_looks_and_then_once_for_many(nodes, monkeypatch):
    monkeypatch.setattr(job_view, "FRESH", 60.0)
    channel, asked = nodes.agents.channels[0], []
    ask_all = channel.ask_all
    monkeypatch.setattr(channel, "ask_all", lambda *question: asked.append(question[0]) or ask_all(*question))
    nodes.pages[0]._views._nodes_at = 0.0
    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(nodes.status)
    assert asked == ["status"]


# --- who may do what


def test_actions_need_the_right_token_and_reads_a_name_of_this_machine_and_a_refused_drain_says_why(nodes, caplog):
    before = metrics.counts[REFUSED]
    wrong = ["", "x", nodes.pages[0].token[:-1], nodes.pages[1].token, "é"]
    for path in ("/flush", "/stop", "/drain"):
        for token in wrong:
            assert nodes.ask(0, path, token.encode().decode("latin-1"), b'{"host": "host1"}')[0] == 403
    assert nodes.ask(0, "/flush?token=" + nodes.pages[0].token, "")[0] == 403
    assert metrics.counts[REFUSED] - before == 3 * len(wrong) + 1
    assert sum("refused an action" in record.message for record in caplog.records) == 1
    assert nodes.ask(1, "/drain", nodes.pages[1].token, b'{"host": "host1"}')[0] == 421
    assert nodes.ask(0, "/flush")[0] == 405
    for path in ("/", "/live", "/status.json"):
        code, text, headers = nodes.ask(0, path)
        assert code == 200 and nodes.pages[0].token not in text + str(headers), "who reads needs no token and gets none"
    for host, code in {"localhost": 200, "[::1]:80": 200, "evil.example:9400": 403, "10.0.0.1": 403}.items():
        assert nodes.ask(0, "/", Host=host)[0] == nodes.ask(0, "/status.json", Host=host)[0] == code
        assert nodes.ask(0, "/flush", nodes.pages[0].token, Host=host)[0] == code
    for body, why in {
        **dict.fromkeys((b"", b"\xff", b"[" * 50_000, b'["host1"]', b'{"host": 7}', b'{"host": ""}'), "names no host"),
        b'{"host": "host1"}': "a job with this rendezvous cannot go on without a host",
        b'{"host": "host1", "undo": true}': "a job with this rendezvous drains no hosts",
    }.items():
        code, text, _ = nodes.ask(0, "/drain", nodes.pages[0].token, body)
        found = json.loads(text)
        assert code == 200 and found["outcome"] == "refused" and why in found["why"]


def flushed(served, held, outcomes):
    """The answer to a flush, where nodes hold saves of some steps; and what each was asked for."""
    asked = []
    for rank, (saver, steps) in enumerate(zip(served.agents.savers, held, strict=True)):
        if steps is None:
            saver._peers.close()
        saver.in_memory = lambda steps=steps: {"/run": [(1, step) for step in steps]}
        saver.persist = lambda where, save, rank=rank: asked.append((rank, where, tuple(save))) or outcomes[rank]
    (one,) = json.loads(served.ask(0, "/flush", served.pages[0].token)[1])["directories"].values()
    return one, sorted(asked)


FLUSHES = [
    ([[5, 10], [10, 15], [5, 10, 15]], ["begun"] * 3, ""),
    ([[5], [10], [15]], [], "no save is whole on all nodes yet"),
    ([[], [], []], [], "nothing is in memory yet"),
    ([[5], [5], [5]], ["begun", "begun", "gone"], "each save was overwritten"),
    ([[5], [5], None], [], "node 2 does not answer"),
]


def test_a_flush_takes_the_newest_save_that_all_nodes_have_or_says_what_is_not_there(own_nodes):
    """Each node's own newest would be another one, of which no checkpoint would become whole."""
    for held, outcomes, why in FLUSHES:
        one, asked = flushed(own_nodes, held, outcomes)
        assert why in one.get("why", "") and (one["outcome"] == "nothing") == bool(why)
        if not why:
            assert one == {"step": 10, "history": 1, "outcome": "begun"}
            assert asked == [(rank, "/run", (1, 10)) for rank in range(3)]


def test_a_stop_that_is_asked_for_twice_is_one_signal_to_each_agent(own_nodes, monkeypatch):
    """These three agents are in one process, which would end: a third signal to one gives up its last flush."""
    sent = []
    refused = json.loads(own_nodes.ask(0, "/stop", own_nodes.pages[0].token)[1])
    assert refused["nodes"] == [] and {*refused["refused"]} == {"0", "1", "2"}, "they handle no signal"
    monkeypatch.setattr(job_actions, "_LATER", 0.01)
    monkeypatch.setattr(job_actions.os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(job_actions.signal, "getsignal", lambda number: SIGNAL_HANDLER)
    answers = [json.loads(own_nodes.ask(0, "/stop", own_nodes.pages[0].token)[1]) for _ in range(3)]
    assert all(answer["nodes"] == [0, 1, 2] and not answer["missing"] for answer in answers)
    until(lambda: len(sent) == 3)
    assert sent == [(os.getpid(), signal.SIGTERM)] * 3


# --- what is shown


def test_names_from_logs_and_nodes_are_shown_and_never_obeyed():
    told = [
        line("job_started", script=HOSTILE, host=HOSTILE, run_id=HOSTILE, boot=HOSTILE),
        line("workers_started", pids={"0": 5, HOSTILE: 7}),
        line("worker_joined", directory=HOSTILE, rank=0, local_rank=0),
        line("skipped", step=1, reason=HOSTILE),
        line("worker_failed", rank=0, exception=HOSTILE, frame=HOSTILE, host=HOSTILE, log=HOSTILE),
        line("straggler", rank=0, host=HOSTILE, part=HOSTILE, cost=0.2),
        metrics.to_line(metrics.stamp(HOSTILE) | {HOSTILE: HOSTILE}),
    ]
    loss = {"save": [1, 5], "steps": 2, "seconds": 1.0, "at_least": True}
    tier = {"step": 5, "history": 1, "age": 1.0, "location": HOSTILE}
    tiers = {"memory": tier, "storage": tier, "remote": tier, "saves": 1, "skipped": 0, "trouble": HOSTILE}
    tiers |= {"directory": HOSTILE, "loss": dict.fromkeys(("worker", "node", "storage"), loss)}
    answer = {"host": HOSTILE, "tiers": [tiers], "logged": {"1": {"step": 5, "values": {HOSTILE: HOSTILE}}}}
    with contextlib.ExitStack() as stack:
        served = Served(2, stack, told, doing=HOSTILE)
        served.agents.channels[1].answer("status", lambda *_: {**status_of(1), **answer})
        text = served.ask(0, "/")[1]
        parts = json.loads(served.ask(0, "/live")[1])["parts"]
    for html in (text, *parts.values()):
        page = Page(html)
        assert "img" not in page.tags and not [name for name in page.attributes if name.startswith("on")]
        assert "\x1b" not in html and "\x07" not in html
    assert text.count("<script") == 1 and text.count("&lt;script&gt;") > 10
    assert not any("<script" in html for html in parts.values())


def test_routine_events_in_a_row_are_one_line_and_a_log_that_grows_counts_up_to_its_last_record():
    events = Story().starts(1, 2, 3, 4).loads(5, 0.1).trains(6, 10).tell("persisted", step=5).log.events
    assert [len(events) - len(settled(events, WALL + now)) for now in (7.0, 60.0)] == [1, 0]
    assert settled([], 0.0) == []
    story = Story().starts(1, 2, 3, 4).loads(5, 0.1, step=20).dies(6)
    for step in range(1000):
        story.at(7.0 + step, "persisted", step=step, bytes=1000, seconds=0.1)
        story.at(7.5 + step, "persisted", step=step, bytes=1000, seconds=0.2)  # by the other node
        story.at(7.6 + step, "skipped", step=step, reason=("busy", "full")[step % 2])
    story.at(2000.0, "persist_failed", step=7, error="full").at(2001.0, "strange", level=3)
    found = [one.text for one in lines(newest(story.log.events))]
    assert found[:5] == [
        "strange: level 3",
        "step 7 could not be persisted: full",
        "step 999 was not saved: full; 499 more before it",
        "step 999 is on storage: 1.0 kB in 200 ms; 999 more before it",
        "step 998 was not saved: busy; 499 more before it",
    ]
    assert "rank 1 died: SIGKILL" in found and "ranks 0-1 resumed step 20 from memory in 100 ms" in found


def test_the_memory_of_logs_is_given_back_when_nobody_looks_any_more(own_nodes, monkeypatch):
    monkeypatch.setattr(job_view, "FORGOTTEN", -1.0)
    page = own_nodes.pages[0]
    page.rest()
    assert own_nodes.status()["events"]
    page.rest()
    assert not page._views._newest and not page._views._logs._own.events
    assert own_nodes.status()["events"]
