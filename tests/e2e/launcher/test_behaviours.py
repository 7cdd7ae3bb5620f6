"""Behaviour that torch's own tests require of torchrun, required of our launcher in this process."""

import json
from pathlib import Path
from unittest.mock import MagicMock, Mock, patch

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api as launcher_api
from torch.distributed.run import determine_local_world_size

from fastckpt_run.main import run
from tests.e2e.launcher.conftest import FORK, Jobs, program
from tests.support.ports import free_port

TOUCH, SHELL = program("touch.py"), program("touch.sh")
PORT = str(free_port())


def ranks(folder: Path) -> set[int]:
    return {int(path.suffix[1:]) for path in folder.glob("rank.*")}


def told(folder: Path, rank: int = 0) -> dict[str, dict[str, str]]:
    return json.loads((folder / f"rank.{rank}").read_text())


def rendezvous() -> list[str]:
    conf = "join_timeout=60,last_call_timeout=1,timeout=60"
    return ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", f"--rdzv-conf={conf}"]


@pytest.mark.usefixtures("started")
def test_a_python_script_runs_with_its_arguments(here: Path) -> None:
    run(["--nnodes=1", "--nproc-per-node=4", "--rdzv-id=7", "--monitor-interval=1", TOUCH, "--lr=1", "--fast-x"])
    assert ranks(here) == {0, 1, 2, 3}
    environment = told(here, 3)["environment"]
    assert environment["TEST_SENTINEL"] == "of the parent"
    assert (environment["RANK"], environment["LOCAL_RANK"], environment["WORLD_SIZE"]) == ("3", "3", "4")
    assert told(here)["arguments"] == ["--lr=1", "--fast-x"]


@pytest.mark.parametrize(
    ("argv", "variables", "seen"),
    [
        (
            ["--fast-slots=2", TOUCH],
            {"FASTCKPT_FILL_THREADS": "3"},
            {"FASTCKPT_SLOTS": "2", "FASTCKPT_FILL_THREADS": "3"},
        ),
        (
            ["--nproc-per-node=2", "--master-addr=localhost", f"--master-port={PORT}", "--node-rank=0", TOUCH],
            {},
            {"MASTER_ADDR": "localhost", "MASTER_PORT": PORT, "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        ),
        (
            ["--nproc-per-node=2", "--virtual-local-rank", TOUCH],
            {"CUDA_VISIBLE_DEVICES": "4,7"},
            {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "7"},
        ),
        (["--standalone", "--nproc-per-node=4", TOUCH], {}, {"RANK": "3"}),
    ],
    ids=["settings", "a place", "virtual ranks", "standalone"],
)
def test_workers_get_the_environment_of_the_agent_and_of_options(
    here: Path, argv: list[str], variables: dict[str, str], seen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run(["--rdzv-id=ours", *argv])
    environment = told(here, max(ranks(here)))["environment"]
    assert environment["FASTCKPT_AGENT"] and seen.items() <= environment.items()
    assert "--standalone" not in argv or environment["TORCHELASTIC_RUN_ID"] != "ours"


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


@pytest.mark.parametrize(
    ("kind", "name", "asked"),
    [("", "", "auto"), ("cuda", "gpu", "auto"), ("cuda", "gpu", "gpu"), ("xpu", "xpu", "xpu")],
)
def test_nproc_is_the_number_of_devices_or_of_cpus(
    here: Path, kind: str, name: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: bool(kind))
    if kind:
        for place in (f"torch.{kind}", "torch.accelerator"):
            monkeypatch.setattr(f"{place}.device_count", lambda: 3)
        monkeypatch.setattr(f"torch.{kind}.is_available", lambda: True)
        monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: MagicMock(type=name))
        monkeypatch.setattr("torch.distributed.launcher.api.get_default_numa_options", lambda: None)
    run([f"--nproc-per-node={asked}", "--no-python", SHELL])
    assert len(ranks(here)) == (3 if kind else determine_local_world_size("auto")) >= 1


def test_an_elastic_range_of_nodes_starts_with_the_minimum_and_a_worker_that_raises_fails_the_job(here: Path) -> None:
    argv = ["--nnodes=1:2", "--nproc-per-node=2", *rendezvous(), "--rdzv-id=7", "--max-restarts=0", TOUCH]
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


def test_several_agents_form_one_job(here: Path, jobs: Jobs) -> None:
    argv = ["--nnodes=2", "--nproc-per-node=2", *rendezvous(), "--rdzv-id=7", TOUCH]
    other = jobs.start(*argv)
    run(argv)
    other.ends()
    assert ranks(here) == {0, 1, 2, 3}


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


def test_logs_specs_are_found_by_entry_point_and_unknown_ones_refused(here: Path) -> None:
    entry, points = MagicMock(), MagicMock()
    entry.load.return_value = DefaultLogsSpecs
    points.select.return_value.select.return_value = entry
    points.select.return_value.__getitem__.return_value = entry
    with patch("torch.distributed.run.metadata") as metadata:
        metadata.entry_points.return_value = points
        run(["--logs_specs=default", TOUCH])
    assert ranks(here) == {0}
    with pytest.raises(ValueError, match="NONESUCH"):
        run(["--logs_specs=NONESUCH", TOUCH])


@pytest.mark.parametrize("method", ["tcp://localhost:{port}", "env://"])
def test_each_init_method_finds_the_other_workers(jobs: Jobs, method: str) -> None:
    port = free_port()
    static = (*FORK, "--master-addr=localhost", f"--master-port={port}")
    jobs.run(*static, "--nproc-per-node=2", program("restart.py"), "0", method.format(port=port))


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
