"""`fastckpt prove` (docs/operate/chaos.md): a script that resumes bit for bit, and ones in which a resume fails to."""

import copy
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastckpt._core.policy.planned_kills import KINDS
from fastckpt.errors import ConfigError
from fastckpt_run.cli.output import Screen
from fastckpt_run.proof.launch_command import read_command
from fastckpt_run.proof.likely_causes import BACKGROUND, OPTIMIZER, RESUME
from fastckpt_run.proof.proof import AGAIN, KILLED, PLAIN, Proof, ProofPlan
from fastckpt_run.proof.proof import prove as judge
from fastckpt_run.proof.run_history import WorkerStart
from fastckpt_run.proof.script_run import ScriptRun
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
    assert_other_runs_are_judged(proof, capsys)


def assert_other_runs_are_judged(proof: Proof, capsys: pytest.CaptureFixture[str]) -> None:
    """By what the same runs would have recorded of a script that varies by itself, or one that begins afresh."""

    def changed(run: ScriptRun, change: Callable[[WorkerStart], object]) -> ScriptRun:
        history = copy.deepcopy(run.history)
        for start in (each for starts in history.starts.values() for each in starts):
            change(start)
        return replace(run, history=history)

    def judged(plain: ScriptRun, killed: ScriptRun, again: ScriptRun) -> Proof:
        runs = {PLAIN: plain, KILLED: killed, AGAIN: again}
        runner: Any = SimpleNamespace(run=lambda name, _=(): runs[name])
        return judge(runner, ProofPlan(twice=True), os.environ["FASTCKPT_SHM_DIR"], None, print)

    def vary(start: WorkerStart) -> None:
        start.values = dict.fromkeys(start.values, (0.5).hex())

    def begin_again(start: WorkerStart) -> None:
        start.loaded, start.values = None, {}

    varies = judged(proof.plain, changed(proof.killed, vary), changed(proof.plain, vary))
    assert not varies.proven and varies.causes[0].name == BACKGROUND
    assert varies.again is not None and not varies.again.equal
    assert "two runs without kills differ, too" in said(varies, capsys)
    plain = changed(proof.plain, begin_again)
    fresh = judged(plain, changed(proof.killed, begin_again), plain)
    assert fresh.found.equal and not fresh.proven and [cause.name for cause in fresh.causes] == [RESUME]
    assert fresh.found.values == 0 and fresh.found.steps == [6, 12, 18, 24]
    text = said(fresh, capsys)
    assert "call load_checkpoint()" in text and "NOT RESUMED" in text and "rank 0 resumed nothing" in text
    assert "checkpoints alone were compared" in text, "it logs no values"


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
