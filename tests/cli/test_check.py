"""`fastckpt check`: exit codes, limits, one line for node-problem-detector, several nodes by hand, its page."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from fastckpt._core.policy.node_check import FLOORS, Verdict
from fastckpt.errors import ConfigError
from fastckpt_run.cli.check import LONGEST
from fastckpt_run.node_check.pairs_by_hand import check_by_hand
from tests.support.ports import free_port

PAGE = Path(__file__).parents[2] / "docs/operate/node_check.md"
DISK = ("--only", "disk")


def test_a_sound_node_has_code_0_and_is_a_baseline_with_a_tolerance(fastckpt, tmp_path):
    said = fastckpt("check", "--json")
    document = said.document
    assert (said.code, document["verdict"], document["failures"]) == (0, "ok", None)
    kinds = [each["name"].split()[0] for each in document["checks"]]
    assert kinds[:4] == ["shm", "disk", "memory", "loopback"] and set(kinds[4:]) == {"matmul"}
    assert all(each["value"] >= each["limit"] > 0 and each["seconds"] > 0 for each in document["checks"])
    for each in document["checks"]:
        each["value"] = 1e12 if each["name"] == "loopback" else 1e-3
    (tmp_path / "fast.json").write_text(json.dumps(document))
    only = ("--only", "loopback", "--only", "memory", "--tolerance", "0.25", "--json")
    found = fastckpt("check", "--baseline", tmp_path / "fast.json", *only)
    verdicts = {each["name"]: (each["verdict"], each["limit"]) for each in found.document["checks"]}
    assert (found.code, verdicts) == (1, {"memory": ("ok", 0.00025), "loopback": ("problem", 2.5e11)})


REFUSED = [
    ("--min disk=inf", "is no limit"),
    ("--min dsik=200", "no check is named 'dsik'; there are matmul, memory, shm, disk, loopback, pair"),
    ("--baseline /dev/null", "is no baseline"),
    ("--only pair", "there is nothing to check: --only pair takes --nnodes"),
    ("--nnodes 2 --rdzv-endpoint a:b", "give HOST:PORT"),
    ("--nnodes 2 --node-rank 2 --rdzv-endpoint a:1", "is none of --nnodes 2; give 0 to 1"),
    ("s3://bucket/run", "is a store, in which no disk is checked"),
]


def test_arguments_that_make_no_sense_are_refused_with_the_remedy(fastckpt):
    for arguments, message in REFUSED:
        said = fastckpt("check", *arguments.split())
        assert said.code == 2 and message in said.err and not said.out, arguments


def test_one_line_is_as_long_as_node_problem_detector_takes(fastckpt, tmp_path):
    said = fastckpt("check", tmp_path / ("long-" * 40), *DISK, "--one-line")
    assert said.code == 1 and said.out.startswith("problem: disk ") and said.out.count("\n") == 1
    assert len(said.out.strip()) == LONGEST


# --- several nodes


def test_a_rank_that_is_there_twice_is_refused():
    def one(port: int, rank: int, wait: float) -> Any:
        try:
            return check_by_hand(f"127.0.0.1:{port}", rank, 3, [], wait)
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        zero = list(pool.map(partial(one, free_port(), wait=1.0), [0, 0]))
        found = list(pool.map(partial(one, free_port(), wait=3.0), [0, 1, 1]))
    assert sum("node 0 cannot listen at port" in each for each in zero if isinstance(each, str)) == 1
    refused = [each for each in found if isinstance(each, str)]
    assert refused == ["another node has come with --node-rank 1; give each its own, from 0 on"]
    assert [(each[0].verdict, each[1]) for each in found if not isinstance(each, str)] == [(Verdict.OK, [2])] * 2


def test_nodes_to_which_nobody_comes_have_no_verdict(fastckpt):
    for rank, wait, why, end in (
        (0, 1, "no other node has come", "did not come: node 1\n"),
        (1, 0, "node 0 is not reached at 127", ""),
    ):
        place = ["--node-rank", rank, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--wait", wait]
        said = fastckpt("check", "--only", "pair", "--nnodes", 2, *place)
        assert said.code == 2 and said.out.startswith("unknown: pair: ") and why in said.out and said.out.endswith(end)


# --- docs/operate/node_check.md


def test_the_configuration_for_node_problem_detector_runs_the_command_and_fits_its_output(fastckpt):
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
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([\d.]+) [^|]* \|$", PAGE.read_text(), re.MULTILINE))
    assert {name: float(floor) for name, floor in rows.items()} == FLOORS
