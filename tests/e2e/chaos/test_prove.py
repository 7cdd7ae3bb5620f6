"""`fastckpt prove` (docs/operate/chaos.md): a script that resumes bit for bit, and ones in which a resume fails to."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.policy.planned_kills import KINDS
from fastckpt.errors import ConfigError
from fastckpt_run.cli.output import Screen
from fastckpt_run.proof.launch_command import read_command
from fastckpt_run.proof.likely_causes import BACKGROUND, OPTIMIZER, RESUME
from fastckpt_run.proof.proof import Proof, ProofPlan
from fastckpt_run.views import proof_text
from tests.cli.conftest import Fastckpt
from tests.cli.test_output import KEYS
from tests.e2e.chaos.conftest import TRAIN, start_forked, stopped_after

prove_command = sys.modules["fastckpt_run.cli.prove"]
RANKS, ALONE = ["--nproc-per-node=2"], ["--nproc-per-node=1"]


@pytest.fixture(autouse=True)
def _forked(forked_launchers: None) -> None:
    pass


def prove(folder: Path, *script: str, options: list[str] = ALONE, **plan: Any) -> Proof:
    """Without a second run that is not interrupted, unless it is asked for."""
    command = read_command([*options, TRAIN, "--out=elsewhere", *script], "", "", 1)
    proof, kept = prove_command.run_proof(
        command, ProofPlan(**{"twice": False, **plan}), str(folder), 120.0, start_forked
    )
    assert kept == str(folder) and not list(Path(os.environ["FASTCKPT_SHM_DIR"]).iterdir())
    return proof


def said(proof: Proof, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    proof_text.show(Screen(), proof)
    return capsys.readouterr().out


def test_a_script_that_resumes_all_gives_the_same_after_kills_in_each_phase(tmp_path: Path, capsys):
    proof = prove(tmp_path, options=RANKS)
    assert proof.proven and proof.found.values == 48 and proof.found.repeats > 0 and proof.found.differing == 0
    assert {kill.kind for kill, note in proof.kills if note} == set(KINDS)
    assert proof.found.steps == [6, 12, 18, 24] and proof.found.last == (24, 24) and proof.again is None
    assert len(proof.killed.history.starts[0]) == len(proof.killed.history.starts[1]) == 4
    assert "numpy" in " ".join(proof.notes), "generators that the script does not seed are named"
    text = said(proof, capsys)
    assert "PROVEN: with 3 kills" in text and "amid a persist" in text


def test_what_a_resume_lacks_is_named_with_the_first_difference(tmp_path: Path, capsys):
    proof = prove(tmp_path, "--fault=optimizer", kills=1, seed=2)
    [resumed] = proof.killed.history.loads
    value, state = proof.found.value, proof.found.state
    assert not proof.proven and proof.causes[0].name == OPTIMIZER, said(proof, capsys)
    assert value is not None and value.of == (resumed + 2, 0, "loss") and value.a != value.b
    assert state is not None and state.step >= resumed
    assert state.tensors["model.pt: model.0.weight"].count == 128
    text = said(proof, capsys)
    assert f"first value: step {resumed + 2}, loss of rank 0" in text and f"cause 1: {OPTIMIZER}" in text
    assert "128 of 128 elements differ, by " in text and "NOT EQUAL: with 1 kill" in text
    document = prove_command._document(proof, "")
    assert set(document) == set(KEYS["prove"]) and document["first_value"]["resumed"] == resumed
    assert all(type(document[key]) is kind for key, kind in KEYS["prove"].items() if key != "folder")
    json.dumps(document, allow_nan=False)


def test_a_script_that_varies_by_itself_is_told_from_one_that_does_not_resume(tmp_path: Path, capsys):
    proof = prove(tmp_path, "--fault=random", kills=1, twice=True)
    assert not proof.proven and proof.causes[0].name == BACKGROUND
    assert proof.again is not None and not proof.again.equal
    assert "two runs without kills differ, too" in said(proof, capsys)


def test_a_script_that_begins_afresh_is_not_proven_though_all_is_the_same(tmp_path: Path, capsys):
    proof = prove(tmp_path, "--fault=fresh", "--quiet", "--disk=4", kills=1)
    assert proof.found.equal and not proof.proven and [cause.name for cause in proof.causes] == [RESUME]
    assert proof.found.values == 0 and proof.found.steps == [4, 8, 12, 16, 20, 24]
    text = said(proof, capsys)
    assert "call load_checkpoint()" in text and "NOT RESUMED" in text and "rank 0 resumed nothing" in text
    assert "checkpoints alone were compared" in text, "it logs no values"


def test_a_script_that_cannot_be_tried_is_refused_with_the_reason(tmp_path: Path):
    with pytest.raises(ConfigError, match="it saves to /tmp/fixed, not to the directory that it was given"):
        prove(tmp_path, "--fault=fixed")
    assert not Path("/tmp/fixed").exists()


def test_a_wrong_command_line_is_refused():
    with pytest.raises(ConfigError, match="--max-restarts is 2, which 3 kills use up"):
        read_command(["--max-restarts=2", TRAIN], "", "", 3)


def test_a_folder_that_is_not_empty_is_refused(fastckpt: Fastckpt, tmp_path: Path):
    (tmp_path / "precious").touch()
    answer = fastckpt("prove", f"--folder={tmp_path}", TRAIN, "--out=x")
    assert answer.code == 2 and f"{tmp_path} is not empty (it has precious)" in answer.err
    assert fastckpt("prove", "--dir-argument=--out", "--dir-variable=OUT", TRAIN).code == 2


def test_ctrl_c_leaves_no_process_and_no_folder_of_its_own(fastckpt: Fastckpt):
    temporary = Path(os.environ["TMPDIR"])
    with stopped_after(lambda: [*temporary.glob("*/uninterrupted/record/rank-0.jsonl")], signal.SIGINT):
        answer = fastckpt("prove", TRAIN, "--out=x", "--pause=60")
    assert answer.code == 128 + signal.SIGINT and "fastckpt: stopped" in answer.err
    assert not [*temporary.glob("fastckpt-prove-*")]
