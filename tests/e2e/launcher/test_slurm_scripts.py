"""examples/slurm: their syntax, the command lines they make of Slurm's variables, what they do with the exit code."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from fastckpt_run.options import parse

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples/slurm"
PAGE = ROOT / "docs/clusters/slurm.md"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
FAKES = {
    # What follows srun's own options, with all that it depends on, and the code that the test names.
    "srun": 'printf "%s\\n" "$@" > srun.options\n[ -z "$TEST_SRUN" ] || exit "$TEST_SRUN"\n'
    'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
    "fastckpt-run": 'printf "%s\\n" "$@" > command\necho "$CHECKPOINT_DIR" > place\nexit "$TEST_CODE"',
    "scontrol": 'if [ "$1 $2" = "show hostnames" ]; then printf "%s\\n" a b c d; else echo "$@" >> scontrol.log; fi',
}


def run(folder: Path, script: Path, code: int, **variables: str) -> "subprocess.CompletedProcess[str]":
    for name, text in FAKES.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "[a-d]", "SLURMD_NODENAME": "c"}
    path = f"{folder}/bin:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", script, "train.py", "--lr", "0.1"],
        cwd=folder, capture_output=True, text=True, timeout=30, check=False,
        env=os.environ | slurm | {"PATH": path, "TEST_CODE": str(code), **variables},
    )  # fmt: skip


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_scripts_signal_the_steps_before_the_time_limit_and_may_be_requeued() -> None:
    assert [script.name for script in SCRIPTS] == ["many_nodes.sbatch", "one_node.sbatch"]
    for script in SCRIPTS:
        options = set(re.findall(r"^#SBATCH (.*)$", script.read_text(), re.MULTILINE))
        assert any(option.startswith("--cpus-per-task=") for option in options)
        assert {"--signal=TERM@120", "--requeue", "--open-mode=append", "--ntasks-per-node=1"} <= options
        assert any(option.startswith("--time=") for option in options)
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


def test_a_script_for_several_nodes_makes_a_command_line_of_slurms_variables(tmp_path: Path) -> None:
    assert (
        run(tmp_path, FOLDER / "many_nodes.sbatch", 0, SLURM_RESTART_COUNT="2", SLURM_GPUS_ON_NODE="8").returncode == 0
    )
    settings, arguments = parse(lines(tmp_path / "command"))
    assert settings.exit_codes and settings.secret_file == str(tmp_path / "12345.secret")
    assert (tmp_path / "12345.secret").stat().st_mode & 0o777 == 0o600
    assert arguments.rdzv_endpoint == "a:22345,b:22345,c:22345" and arguments.rdzv_id == "12345.2"
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.rdzv_backend) == ("4", "8", "c10d")
    assert arguments.training_script_args == ["--lr", "0.1"]
    assert lines(tmp_path / "place") == ["checkpoints/12345"] and not lines(tmp_path / "scontrol.log")


def test_tasks_of_an_array_have_checkpoint_directories_of_their_own_and_are_requeued_alone(tmp_path: Path) -> None:
    task = {"SLURM_ARRAY_JOB_ID": "12345", "SLURM_ARRAY_TASK_ID": "3"}
    assert run(tmp_path, FOLDER / "one_node.sbatch", 75, CHECKPOINT_DIR="/shared", **task).returncode == 0
    settings, arguments = parse(lines(tmp_path / "command"))
    assert settings.exit_codes and arguments.standalone
    assert lines(tmp_path / "place") == ["/shared/12345_3"]
    assert lines(tmp_path / "scontrol.log") == ["requeue 12345_3"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_does_what_the_exit_code_says_with_the_cores_of_the_job(tmp_path: Path, script: Path) -> None:
    bad = "[a-d]" if script.stem == "one_node" else "c"
    calls = {
        0: [],
        1: [],
        2: [],
        74: ["requeuehold 12345", "update JobId=12345 ReqNodeList=[a-d]"],
        75: ["requeue 12345"],
        76: ["requeue 12345", f"update JobId=12345 ExcNodeList={bad}"],
        137: ["requeue 12345"],
    }
    for start, (code, expected) in enumerate(calls.items()):
        (tmp_path / "scontrol.log").unlink(missing_ok=True)
        own = {"SLURM_CPUS_PER_TASK": "6"} if start else {}
        done = run(tmp_path, script, code, SLURM_RESTART_COUNT=str(start), **own)
        assert done.returncode == (0 if expected else code), done.stderr
        assert lines(tmp_path / "scontrol.log") == expected
        cores = [line for line in lines(tmp_path / "srun.options") if line.startswith("--cpus")]
        assert cores == (["--cpus-per-task=6"] if start else [])  # else srun binds the step to one core
    (tmp_path / "scontrol.log").unlink()
    assert run(tmp_path, script, 75, SLURM_RESTART_COUNT="100").returncode == 75
    assert not lines(tmp_path / "scontrol.log"), "requeued often enough"


def test_a_job_of_several_nodes_is_requeued_if_slurm_cannot_start_its_step(tmp_path: Path) -> None:
    """srun's code is then its own: it may be one that no agent has, or that of an error of a training script."""
    for start, code in enumerate(("1", "233")):
        done = run(tmp_path, FOLDER / "many_nodes.sbatch", 0, TEST_SRUN=code, SLURM_RESTART_COUNT=str(start))
        assert done.returncode == 0, done.stderr
    assert lines(tmp_path / "scontrol.log") == ["requeue 12345"] * 2
    assert run(tmp_path, FOLDER / "many_nodes.sbatch", 1, SLURM_RESTART_COUNT="2").returncode == 1


def test_a_job_of_which_an_agent_was_killed_is_not_held_but_comes_to_its_nodes_again(tmp_path: Path) -> None:
    """The others end with 74, as its part of the newest checkpoint is in memory there and not in storage."""
    (tmp_path / "12345.ends").write_text("0 137 b\n")
    for start in ("0", "1"):
        assert run(tmp_path, FOLDER / "many_nodes.sbatch", 74, SLURM_RESTART_COUNT=start).returncode == 0
    place = "update JobId=12345 ReqNodeList=[a-d]"
    assert lines(tmp_path / "scontrol.log") == ["requeue 12345", place, "requeuehold 12345", place]


def test_the_page_shows_the_script_for_several_nodes_as_it_is() -> None:
    shown = re.findall(
        r"<!-- (examples/\S+) -->\n<!-- runs in: \S+ -->\n```bash\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    assert [name for name, _ in shown] == ["examples/slurm/many_nodes.sbatch"]
    assert shown[0][1] == (FOLDER / "many_nodes.sbatch").read_text()
