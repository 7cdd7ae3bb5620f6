"""--fast-node-check: a node with a problem does not join; one that breaks leaves after its failure, others go on."""

from pathlib import Path

import pytest

from fastckpt_run.main import main
from tests.e2e.launcher.conftest import Jobs, Launch, until
from tests.support.json_lines import whole_lines
from tests.support.ports import free_port

SCRIPT = """
import os, pathlib, shutil, time
folder = pathlib.Path(os.environ["JOB_FOLDER"])
name = "-".join(os.environ[each] for each in ("NODE", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
(folder / f"up-{name}").touch()
while not (folder / "go").exists():
    time.sleep(0.02)
    if os.environ["NODE"] == "1" and (folder / "break").exists():
        shutil.rmtree(os.environ["TMPDIR"])
        raise SystemExit(3)
"""


def test_a_node_with_a_problem_does_not_join_and_its_code_is_76(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        # A directory that is no tmpfs; nobody is at the endpoint, and nobody is looked for.
        options = ["--fast-node-check", f"--fast-shm-dir={here}", "--rdzv-backend=c10d", "--rdzv-endpoint=192.0.2.1:1"]
        main([*options, "--nnodes=2", "train.py"])
    assert end.value.code == 76
    error = capfd.readouterr().err
    assert f"failed the node check, and takes no part in the job: problem: shm: {here} is no tmpfs" in error
    assert "fastckpt check" in error and "Traceback" not in error


def test_a_node_that_breaks_leaves_after_its_failure_and_the_other_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    endpoint = f"127.0.0.1:{free_port()}"

    def start(node: int) -> Launch:
        own = tmp_path / f"tmp-{node}"
        own.mkdir()
        place = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=check"]
        ours = ["--fast-node-check", f"--fast-events={tmp_path}/events-{node}", f"--log-dir={tmp_path}/logs-{node}"]
        arguments = [*place, f"--rdzv-endpoint={endpoint}", *ours, "train.py"]
        return jobs.start(*arguments, NODE=str(node), TMPDIR=str(own))

    agents = [start(node) for node in (0, 1)]
    until(lambda: len([*tmp_path.glob("up-*-2-*")]) == 2, "both train")
    (tmp_path / "break").touch()
    said = agents[1].ends(76)
    until(lambda: any(tmp_path.glob("up-0-1-*")), "the first node trains alone")
    (tmp_path / "go").touch()
    agents[0].ends()
    assert "failed the node check, and takes no part in the job: problem: disk " in said and "No such file" in said
    events = [whole_lines(tmp_path / f"events-{node}") for node in (0, 1)]
    good, bad = ([event for event in each if event["event"] == "node_check"] for each in events)
    assert [each["occasion"] for each in bad] == ["start", "round", "failure"]
    assert [bad[0]["verdict"], bad[2]["verdict"]] == ["ok", "problem"]
    assert [(each["occasion"], each["bad"]) for each in good] == [("start", []), ("round", [])]
