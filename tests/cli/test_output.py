"""Rules of all commands: keys, streams, exit codes, tables that can be piped, a quick start."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt import DdpCheckpointer, StorageType
from fastckpt._core.inspect.address import Address, parse
from fastckpt.errors import ConfigError
from fastckpt_run.cli import main, output
from fastckpt_run.views.top_text import TextTable, Toned, blocks
from tests.cli.conftest import publish
from tests.cli.test_docs import leave_log, page_of_a_job
from tests.support.ports import free_port

FASTCKPT = str(Path(sys.executable).with_name("fastckpt"))


def keys(text: str) -> set[str]:
    return {*text.split()}


CHECKPOINT = keys("step history tier state whole why size world time age path")
JOB = keys("pid host started arena")
ARENA = keys("path state kind uid size directory pid host started writers newest slots")
ENTRY = keys("name kind type shape bytes storage value")
FAILURE = keys(
    "node at kind rank exitcode silent stopped relaunched met started imported joined resumed first_step load step "
    "tier repeated exception frame host log restarts_left restarts awaited"
)
FIGURE = keys("seconds source")
DECISION = keys("at directory step memory storage overhead bound changed why")
PLAN = dict.fromkeys(keys("nodes ranks_per_node ranks"), int) | dict.fromkeys(keys("assumed trial"), type(None))
TOP = dict.fromkeys(keys("at goodput total reported"), float) | dict.fromkeys(keys("url directory trouble"), str)
DRAIN = dict.fromkeys(keys("url host outcome why"), str) | dict.fromkeys(keys("nodes step"), int)
# Scripts depend on these keys: new ones may come, none may go or change its meaning.
KEYS: dict[str, dict[str, Any]] = {
    "ls": {"directory": str, "jobs": [JOB], "checkpoints": [CHECKPOINT]},
    "show": {"checkpoint": CHECKPOINT, "files": [keys("name path size tensors bytes entries")]},
    "which": {"directory": str, "outcome": str, "choice": CHECKPOINT, "others": [CHECKPOINT], "jobs": [JOB]},
    "verify": {"directory": str, "findings": [keys("step history tier path verdict why expected found")]}
    | dict.fromkeys(keys("good bad unknown"), int),
    "diff": {"files": [keys("name equal compared only_a only_b changes tensors")], "equal": bool}
    | {"a": str, "b": str, "only_a": list, "only_b": list},
    "export": dict.fromkeys(keys("source out format only"), str) | {"size": int},
    "prune": {"keep": [CHECKPOINT], "delete": [CHECKPOINT], "freed": int, "jobs": [JOB]}
    | {"directory": str, "policy": dict, "done": bool},
    "report": {"launches": [keys("node host pid run_id script begin seconds starts outcome")], "failures": [FAILURE]}
    | {"hosts": [keys("host failures first checks")], "decisions": [DECISION], "directory": str, "remote": type(None)}
    | dict.fromkeys(keys("logs superseded slow_ranks offloaded metrics"), list)
    | dict.fromkeys(keys("time steps checkpoints"), dict)
    | {"goodput": float, "total": float, "unreadable": int, "events_lost": int},
    "plan": {"plan_of": str, "checkpoint": CHECKPOINT, "shape_source": str, "bytes": keys("save node files")}
    | dict.fromkeys(keys("step snapshot restart mtbf"), FIGURE)
    | {"persist": FIGURE | keys("rate written_now"), "intervals": keys("memory storage source"), **PLAN}
    | {"memory": keys("slots slot arena tmpfs cgroup processes slots_that_fit free total docker kubernetes")}
    | {"goodput": keys("memory storage without"), "failures": keys("failures seconds mean least most")}
    | {"growth": keys("per_step step size points method three_slots_until two_slots_until")}
    | {"unknown": [keys("what remedy")]},
    "check": {"checks": [keys("name verdict message value unit limit seconds")], "failures": dict, "absent": list}
    | {"host": str, "verdict": str},
    "doctor": {"host": str, "directory": str, "state": str, "lines": [keys("name state found remedy")]},
    "top": {"job": keys("state run_id script host begin launches"), "time": dict, "failures": int, "events": list}
    | {"steps": keys("new repeated per_second now"), "nodes": [keys("node answers host workers tiers logged")]}
    | {"loss": [keys("directory worker node storage")], **TOP},
    "drain": DRAIN | {"at": float, "new": list},
    "chaos": dict.fromkeys(keys("warnings kills faults"), list)
    | {"directory": str, "came_back": int, "tiers": dict, "ended": str, "job": str, "seconds": float},
    "prove": dict.fromkeys(keys("resumed values checkpoints first_value first_checkpoint seconds"), dict)
    | dict.fromkeys(keys("kills last causes notes"), list)
    | {"proven": bool, "exit_code": int, "equal": bool, "first_step": int, "again": type(None), "folder": str},
    "explain": {"codes": [keys("code title messages cause remedies lost page")]},
    "shm ls": {"arenas": [ARENA]},
    "shm clean": {"done": bool, "arenas": [ARENA | {"removed", "why"}]},
}


OF_JOBS = ("chaos", "prove", "drain")
"""Commands that take a job: tests/e2e/chaos has them, and tests/nodes."""


def test_json_documents_of_all_commands_have_the_documented_keys(fastckpt, three, tmp_path):
    more: dict[str, list[Any]] = {
        "prune": [three, "--keep-last", 1],
        "export": [three, tmp_path / "out.pt"],
        "diff": [three, f"{three}@10"],
        "check": [three, "--only=disk"],
        "top": [tmp_path / "live"],
        "explain": ["FC-030"],
        "shm ls": [],
        "shm clean": [],
    }
    with DdpCheckpointer(three) as checkpointer, page_of_a_job(tmp_path / "live"):
        checkpointer.save_checkpoint(40, {"w": torch.ones(1)}, storage_type=StorageType.MEMORY)
        leave_log(three)
        for command in (each for each in KEYS if each not in OF_JOBS):
            said = fastckpt(*command.split(), *more.get(command, [three]), "--json")
            assert not said.err and said.out.endswith("}\n"), command
            document = said.document
            assert set(document) == set(KEYS[command]), command
            for key, kind in KEYS[command].items():
                _assert_is(document[key], kind)
            for file in document["files"] if command == "show" else []:
                assert all(set(entry) == ENTRY for entry in file["entries"])


def _assert_is(value: Any, kind: Any) -> None:
    if isinstance(kind, list):
        assert value and all(set(element) == kind[0] for element in value)
    elif isinstance(kind, set):
        assert set(value) == kind
    else:
        assert type(value) is kind


def test_the_keys_of_every_command_are_frozen_in_this_file(fastckpt):
    groups = {name: getattr(command, "commands", None) for name, command in main.commands.items()}
    names = {f"{name} {sub}" for name, subs in groups.items() if subs for sub in subs}
    assert names | {name for name, subs in groups.items() if not subs} == set(KEYS)
    listed = fastckpt("--help").out.splitlines()
    assert {line.split()[0] for line in listed if line.startswith("  ")} >= main.commands.keys()


def test_errors_go_to_stderr_with_code_2_also_those_of_the_system_and_an_unset_variable(
    fastckpt, three, tmp_path, monkeypatch
):
    for command in ("ls", "show", "which", "verify", "prune --keep-last 1", "report", "top"):
        said = fastckpt(*command.split(), tmp_path / "none", "--json")
        assert said.code == 2 and not said.out and said.err.startswith("fastckpt: error: ") and "none" in said.err
        assert fastckpt(*command.split(), "--no-such-option").code == 2
    monkeypatch.chdir(three)
    for command in (["ls"], ["prune", "--keep-last", "1", "--yes"]):
        assert "no directory" in fastckpt(*command, "").err and fastckpt(*command, ".").code == 0
    Path("file").touch()
    said = fastckpt("ls", three, env={"FASTCKPT_SHM_DIR": str(three / "file")})
    assert said.code == 2 and said.err.startswith("fastckpt: error: ") and str(three / "file") in said.err


def test_commands_start_without_torch_and_those_with_json_without_tables(three):
    program = (
        "import sys; from fastckpt_run.cli import main\n"
        "for command in sys.argv[1:]:\n"
        "    try: main(command.split('|'))\n"
        "    except SystemExit: pass\n"
        "    print([m for m in ('torch', 'rich', 'fsspec', 'numpy') if m in sys.modules], file=sys.stderr)"
    )
    leave_log(three)
    commands = [f"{name}|{three}|--json" for name in ("ls", "report", "plan")]
    commands += ["explain|FC-030|--json", *(f"{name}|{three}" for name in ("ls", "show", "verify"))]
    done = subprocess.run([sys.executable, "-c", program, *commands], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["[]"] * 4 + ["['rich']"] * 3


def test_piped_output_has_whole_lines_without_colour_and_no_control_characters_of_names(fastckpt, tmp_path):
    directory = tmp_path / ("long-" * 45) / "run"
    directory.parent.mkdir()
    publish(directory, 7)
    environment = os.environ | {"FORCE_COLOR": "", "COLUMNS": "40"}
    lines = subprocess.check_output([FASTCKPT, "ls", directory], text=True, timeout=60, env=environment).splitlines()
    assert len(lines) == 2 and lines[1].endswith(str(directory / "checkpoint-7"))
    assert not any(line != line.rstrip() or "\x1b" in line for line in lines)
    name = "\x1b]0;owned\x07\x1b[2J[bold]w[/bold]\udc80"
    torch.save({name: torch.ones(1), "text": "\x1b[31mred"}, tmp_path / "model.pt")
    said = fastckpt("show", tmp_path / "model.pt")
    assert said.code == 0 and "\x1b" not in said.out and "\x07" not in said.out
    assert "[bold]w[/bold]\\udc80" in said.out
    entries = fastckpt("show", tmp_path / "model.pt", "--json").document["files"][0]["entries"]
    assert entries[1]["name"] == name


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"SSH-2.0-x\r\n", "is not the live page of a job"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 100_000, "is not the live page of a job"),
        (b'HTTP/1.0 200 OK\r\nContent-Length: 999\r\n\r\n{"job":', "does not answer"),
    ],
    ids=["another protocol", "very deep", "torn"],
)
def test_top_says_what_is_wrong_with_a_server_that_is_no_page(fastckpt, answer, why):
    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        pool.submit(serve)
        said = fastckpt("top", f"http://127.0.0.1:{listening.getsockname()[1]}")
    assert said.code == 2 and why in said.err


def test_a_drain_needs_the_token_of_a_job_that_answers(fastckpt, tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    for arguments, why in (
        ([f"{url}/#token="], f"no token for {url}: give the link that the launcher has logged"),
        ([f"{url}/#token=x", "--undo"], f"{url} does not answer"),
        ([url, "--token", "x"], f"{url} does not answer"),
        ([tmp_path, "--token", "x"], f"{tmp_path} has no event log"),
    ):
        said = fastckpt("drain", "node1", *arguments)
        assert said.code == 2 and why in said.err


def test_ages_fit_their_units_and_columns_of_top_that_say_least_are_left_out_first_and_trouble_never():
    ages = {None: "?", 0.2: "0 s", 119: "119 s", 120: "2 min", 7200: "2 h", 10 * 86400: "10 d"}
    assert {seconds: output.age(seconds) for seconds in ages} == ages
    document = json.loads(Path(__file__).with_name("recorded_status.json").read_text())
    document["nodes"][0]["tiers"][0]["trouble"] = "storage is full"
    tables = {
        width: [block for block in blocks(document, width) if isinstance(block, TextTable)] for width in (40, 200)
    }
    narrow, wide = ([[name.lstrip(">") for name in each.columns] for each in tables[w]] for w in (40, 200))
    assert narrow[0] == ["RANK", "DOING", "STEP", "HEARTBEAT"]
    assert "TROUBLE" in narrow[2] and "REMOTE" not in narrow[2]
    assert "PROCESS" in wide[0] and "NODE" in wide[2]
    (trouble,) = (row[-1] for each in tables[40] for row in each.rows if row[-1] == "storage is full")
    assert isinstance(trouble, Toned) and trouble.tone == "bad"


def test_a_path_that_exists_is_taken_literally_and_an_unknown_tier_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text, address in (
        ("run@7.2:memory", Address("run", 7, 2, "memory", explicit=True)),
        ("run@latest:storage", Address("run", tier="storage", explicit=True)),
        ("me@home/run", Address("me@home/run")),
        ("run@5@7", Address("run@5", 7, explicit=True)),
        ("s3://me@host:9000/run@7", Address("s3://me@host:9000/run", 7, explicit=True)),
    ):
        assert parse(text) == address and str(address) == text
    (tmp_path / "run@5").mkdir()
    assert parse("run@5") == Address("run@5")
    assert parse("./run@5@latest") == Address("./run@5", explicit=True)
    with pytest.raises(ConfigError, match=r"'disk'.*memory, storage"):
        parse("run@6:disk")
