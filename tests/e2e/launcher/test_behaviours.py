"""Behaviour that torch's own tests require of torchrun, required of our launcher in this process."""

import json
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api as launcher_api

from fastckpt_run.main import run
from tests.e2e.launcher.conftest import FORK, Jobs, program
from tests.support.ports import free_port

TOUCH, SHELL = program("touch.py"), program("touch.sh")


def ranks(folder: Path) -> set[int]:
    return {int(path.suffix[1:]) for path in folder.glob("rank.*")}


def told(folder: Path, rank: int = 0) -> dict[str, dict[str, str]]:
    return json.loads((folder / f"rank.{rank}").read_text())


@pytest.mark.usefixtures("started")
def test_a_python_script_runs_with_its_arguments(here: Path) -> None:
    run(["--standalone", "--nproc-per-node=4", "--rdzv-id=7", "--monitor-interval=1", TOUCH, "--lr=1", "--fast-x"])
    assert ranks(here) == {0, 1, 2, 3}
    environment = told(here, 3)["environment"]
    assert environment["TEST_SENTINEL"] == "of the parent" and environment["TORCHELASTIC_RUN_ID"] != "7"
    assert (environment["RANK"], environment["LOCAL_RANK"], environment["WORLD_SIZE"]) == ("3", "3", "4")
    assert told(here)["arguments"] == ["--lr=1", "--fast-x"]


def test_workers_get_the_environment_of_the_agent_and_of_options(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(free_port())
    monkeypatch.setenv("FASTCKPT_FILL_THREADS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    place = ["--master-addr=localhost", f"--master-port={port}", "--node-rank=0"]
    run(["--rdzv-id=ours", "--fast-slots=2", "--nproc-per-node=2", "--virtual-local-rank", *place, TOUCH])
    environment = told(here, 1)["environment"]
    assert environment["FASTCKPT_AGENT"]
    wanted = {"FASTCKPT_SLOTS": "2", "FASTCKPT_FILL_THREADS": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    wanted |= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "7"}
    assert wanted.items() <= environment.items()


def test_a_shell_script_runs_with_one_worker_by_default(here: Path) -> None:
    with pytest.raises(ValueError, match="--no-python"):
        run(["--no-python", "--module", SHELL])
    run(["--no-python", SHELL])
    assert ranks(here) == {0}


def test_a_module_runs_with_its_arguments(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(TOUCH).parent))
    run(["-m", "touch", "x"])
    assert told(here)["arguments"] == ["x"]


def test_options_may_be_given_by_environment_variables(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NNODES": 1, "NPROC_PER_NODE": 4, "RDZV_ID": 7, "MONITOR_INTERVAL": 1, "NO_PYTHON": 1}.items():
        monkeypatch.setenv(f"PET_{name}", str(value))
    monkeypatch.setenv("PET_MODULE", "1")
    with pytest.raises(ValueError, match="--module"):
        run([SHELL])
    monkeypatch.setenv("PET_MODULE", "0")
    run([SHELL])
    assert ranks(here) == {0, 1, 2, 3}


def test_an_elastic_range_of_nodes_starts_with_the_minimum_and_a_worker_that_raises_fails_the_job(here: Path) -> None:
    place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-conf=last_call_timeout=1"]
    argv = ["--nnodes=1:2", "--nproc-per-node=2", *place, "--rdzv-id=7", "--max-restarts=0", TOUCH]
    run(argv)
    assert ranks(here) == {0, 1}
    with patch("torch.distributed.elastic.events.record") as record, pytest.raises(ChildFailedError) as error:
        run([*argv, "--fail"])
    record.assert_called_once()
    assert error.value.get_first_failure()[1].exitcode == 1


def test_an_agent_that_raises_records_a_failure_and_names_of_torch_are_restored(here: Path) -> None:
    class AgentError(Exception):
        pass

    before = launcher_api.LocalElasticAgent
    agent = "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent.run"
    with (
        patch(agent, side_effect=AgentError),
        patch("torch.distributed.elastic.events.record") as record,
        pytest.raises(AgentError),
    ):
        run(["--nproc-per-node=2", TOUCH])
    record.assert_called_once()
    assert launcher_api.LocalElasticAgent is before


def test_run_path_runs_a_script_with_its_arguments(jobs: Jobs, tmp_path: Path) -> None:
    jobs.run(*FORK, "--nproc-per-node=2", TOUCH, f"--folder={tmp_path}", "x")
    assert ranks(tmp_path) == {0, 1}
    assert told(tmp_path)["arguments"] == ["x"]


def test_the_rendezvous_is_shut_down_once(here: Path) -> None:
    agent, handler = Mock(), Mock()
    agent.run.return_value = RunResult(WorkerState.SUCCEEDED)
    with (
        patch("fastckpt_run.main.FastckptAgent", return_value=agent) as constructed,
        patch("torch.distributed.elastic.rendezvous.registry.get_rendezvous_handler", return_value=handler),
    ):
        run(["--nproc-per-node=2", TOUCH])
    constructed.assert_called_once()
    handler.shutdown.assert_called_once()


@pytest.mark.usefixtures("started")
def test_redirected_logs_are_captured_per_rank(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank${rank}]: ")
    logs = here / "logs"
    run(["--nproc-per-node=2", "--redirect=3", "--tee=3", f"--log-dir={logs}", "--no-python", SHELL])
    out = capsys.readouterr().out
    assert all(f"[rank{rank}]: creating rank.{rank}" in out for rank in (0, 1))
    found = {path.read_text() for path in logs.glob("*/attempt_0/*/stdout.log")}
    assert found == {"creating rank.0\n", "creating rank.1\n"}
