"""`fastckpt check`: exit codes, limits, one line for node-problem-detector, several nodes by hand, its page."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastckpt._core.report.events import FOLDER
from fastckpt_run.cli.check import LONGEST
from tests.cli.conftest import Fastckpt
from tests.cli.test_docs import RECORDED
from tests.ports import free_port

PAGE = Path(__file__).parents[2] / "docs/node_check.md"
DISK = ("--only", "disk")
COMMAND = [sys.executable, "-c", "from fastckpt_run.cli import main; main()", "check"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command printed for this node, all checks of it."""
    path = tmp_path_factory.mktemp("baseline") / "good.json"
    with path.open("w") as file:
        subprocess.run([*COMMAND, "--json"], stdout=file, timeout=120, check=True)
    return path


def test_a_sound_node_has_code_0_and_a_value_for_each_check(good: Path):
    document = json.loads(good.read_text())
    assert document["verdict"] == "ok" and document["failures"] is None
    kinds = [each["name"].split()[0] for each in document["checks"]]
    assert kinds[:4] == ["shm", "disk", "memory", "loopback"] and set(kinds[4:]) == {"matmul"}
    assert all(each["value"] >= each["limit"] > 0 and each["seconds"] > 0 for each in document["checks"])


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        (["--min", "disk=1"], 0, "ok: 1 checks passed"),
        (["--min", "disk=99999999"], 1, r"problem: disk .*: .*, less than 99999999"),
    ],
)
def test_a_limit_of_the_user_counts(fastckpt: Fastckpt, tmp_path: Path, options: list[str], code: int, line: str):
    os.chdir(tmp_path)
    said = fastckpt("check", ".", *DISK, *options)
    assert said.code == code and re.fullmatch(line, said.out.splitlines()[0])
    assert len(said.out.splitlines()) == 3


def test_a_good_node_is_a_baseline_with_a_tolerance(fastckpt: Fastckpt, good: Path, tmp_path: Path):
    document = json.loads(good.read_text())
    for each in document["checks"]:
        each["value"] = 1e12 if each["name"] == "loopback" else 1e-3
    (tmp_path / "fast.json").write_text(json.dumps(document))
    only = ("--only", "loopback", "--only", "memory", "--json")
    found = fastckpt("check", "--baseline", tmp_path / "fast.json", *only)
    verdicts = {each["name"]: (each["verdict"], each["limit"]) for each in found.document["checks"]}
    assert (found.code, verdicts) == (1, {"memory": ("ok", 0.0005), "loopback": ("problem", 5e11)})
    assert fastckpt("check", "--baseline", tmp_path / "fast.json", "--tolerance", "1e-12", *only).code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--min", "disk"], "'disk' is no limit; give NAME=NUMBER"),
        (["--min", "disk=fast"], "is no limit"),
        (["--min", "disk=-1"], "is no limit"),
        (["--min", "disk=inf"], "is no limit"),
        (["--baseline", "nowhere.json"], "nowhere.json"),
        (["--baseline", "/dev/null"], "is no baseline"),
        (["--only", "colour"], "colour"),
        (["--only", "pair"], "there is nothing to check: --only pair takes --nnodes"),
        (["--nnodes", "2"], "--rdzv-endpoint is ''; give HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:b"], "give HOST:PORT"),
        (["--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "a:1"], "is none of --nnodes 2; give 0 to 1"),
        (["s3://bucket/run"], "is a store, in which no disk is checked"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_with_the_remedy(fastckpt: Fastckpt, arguments, message):
    said = fastckpt("check", *arguments)
    assert said.code == 2 and message in said.err and not said.out


def test_one_line_is_as_long_as_node_problem_detector_takes(fastckpt: Fastckpt, tmp_path: Path):
    said = fastckpt("check", tmp_path / ("long-" * 40), *DISK, "--one-line")
    assert said.code == 1 and said.out.startswith("problem: disk ") and said.out.count("\n") == 1
    assert len(said.out.strip()) == LONGEST


def test_failures_of_this_host_are_named(fastckpt: Fastckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / FOLDER).mkdir(parents=True)
    log = tmp_path / FOLDER / "000001-node1-1176.jsonl"
    log.write_bytes(RECORDED.read_bytes())
    hosts = {json.loads(line).get("host") for line in log.read_text().splitlines()} - {None}
    monkeypatch.setattr("socket.gethostname", lambda: hosts.copy().pop())
    said = fastckpt("check", tmp_path, *DISK)
    assert "has failed 2 times in this job, of 2 failures in all" in said.out


# --- several nodes


def nodes(count: int, *more: str, ranks: list[int] | None = None) -> list[tuple[int, str]]:
    """Exit codes and output of the nodes that are there."""
    place = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--nnodes", str(count), "--only", "pair", *more]
    ranks = list(range(count)) if ranks is None else ranks
    commands = [[*COMMAND, *place, "--node-rank", str(rank)] for rank in ranks]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(command, **pipes) for command in commands]
    return [(each.communicate(timeout=120)[0], each.returncode)[::-1] for each in started]


def test_two_nodes_meet_by_hand_and_pass():
    for code, said in nodes(2, "--wait", "60"):
        assert code == 0, said
        assert said.startswith("ok: 1 checks passed\n")


def test_without_node_0_or_with_a_rank_twice_there_is_no_verdict():
    [(code, said)] = nodes(2, "--wait", "0", ranks=[1])
    assert code == 2 and said.startswith("unknown: pair: node 0 is not reached at 127.0.0.1:")
    found = nodes(2, "--wait", "3", ranks=[0, 0])
    assert [code for code, _ in found].count(2) >= 1
    assert any("node 0 cannot listen at port" in said or "--node-rank 0" in said for _, said in found)


# --- docs/node_check.md


def test_the_configuration_for_node_problem_detector_runs_the_command_and_fits_its_output(fastckpt: Fastckpt):
    [text] = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    config = json.loads(text)
    assert config["plugin"] == "custom" and config["pluginConfig"]["max_output_length"] == LONGEST
    types = {each["type"] for each in config["conditions"]}
    for rule in config["rules"]:
        assert rule["type"] in ("temporary", "permanent")
        assert rule["type"] == "temporary" or rule["condition"] in types
        assert Path(rule["path"]).name == "fastckpt" and rule["args"][0] == "check" and "--one-line" in rule["args"]
        deadline = float(rule["args"][rule["args"].index("--deadline") + 1])
        assert deadline < float(rule["timeout"].removesuffix("s"))
        said = fastckpt(*rule["args"], "--only", "shm")
        assert said.code == 0 and said.out == "ok: 1 checks passed\n"


def test_each_check_and_its_floor_is_on_the_page():
    from fastckpt._core.policy.node_check import FLOORS

    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([\d.]+) [^|]* \|$", PAGE.read_text(), re.MULTILINE))
    assert {name: float(floor) for name, floor in rows.items()} == FLOORS
