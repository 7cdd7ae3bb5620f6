"""--fast-exit-codes: each cause of the agent's end, in a real launch, and the page that has the table of them."""

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt_run.exit_codes import ADVICE, NOT_STORED, START_AGAIN, Ending
from fastckpt_run.failures.deaths import is_from_outside
from fastckpt_run.main import main
from tests.e2e.launcher.conftest import FORK, LIGHT, Jobs, Launch, program
from tests.support.json_lines import whole_lines
from tests.support.ports import free_port
from tests.support.waits import until

PAGE = Path(__file__).parents[3] / "docs/reference/exit_codes.md"
SHELL = ("--no-python", "sh", "-c")
"""A command; torch replaces $$ by $ in it."""
WAIT = """
import pathlib, sys, time
pathlib.Path("up.{0}").touch()
while not pathlib.Path("go.{0}").exists():
    time.sleep(0.01)
{1}
"""
STUCK = """
import ctypes, os
libc = ctypes.CDLL(None)  # which holds the lock of Python's interpreter no more while it waits: state D
if libc.vfork() == 0:
    libc.sleep(600)
    libc._exit(0)
"""
RANKS_APART = """
import os, torch
from fastckpt import DdpCheckpointer
with DdpCheckpointer(f"{os.environ['JOB_FOLDER']}/rank{os.environ['RANK']}") as checkpointer:
    for step in range(2):
        checkpointer.save_checkpoint(step, {"w": torch.zeros(4)})
"""


class SavingJobs(Jobs):
    """Launches with the option of workers that save."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.environment |= {"FASTCKPT_EXIT_CODES": "1"}

    def script(self, text: str, name: str = "script.py") -> str:
        (self.folder / name).write_text(text)
        return name

    def save(self, *options: str, script: tuple[str, ...] = ()) -> Launch:
        """Start a worker that saves, to memory alone if it does not say more; ``options`` are the launcher's."""
        usual = (program("save.py"), "--saves=5000", "--pause=0.05", "--disk=0")
        return self.start(*FORK, *options, *usual, *script)

    def saves(self) -> list[dict[str, Any]]:
        return whole_lines(self.folder / "saves")

    def until_saves(self, count: int) -> None:
        until(lambda: len(self.saves()) >= count, f"{count} saves")

    def assert_newest_is_durable(self) -> None:
        """The worker may not have come to log the newest save."""
        durable = CheckpointDirectory(self.folder / "checkpoints").checkpoints()[0].id.step
        assert durable - self.saves()[-1]["step"] in (0, 1)

    def worker(self) -> int:
        return max(int(path.suffix[1:]) for path in self.folder.glob("pid.*"))


@pytest.fixture
def jobs(tmp_path: Path, forked_launchers: None) -> Iterator[SavingJobs]:
    jobs = SavingJobs(tmp_path)
    yield jobs
    jobs.end()


def test_signals_for_what_a_process_does_itself_are_no_cause_from_outside() -> None:
    own = {number.name for number in signal.Signals if not is_from_outside(-number)}
    assert own == {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"}
    assert not any(is_from_outside(int(number)) for number in signal.Signals)


def test_a_worker_that_was_killed_from_outside_is_75(jobs: SavingJobs) -> None:
    job = jobs.run("--max-restarts=1", *SHELL, "kill -KILL $$$$", code=75)
    assert job.stderr.endswith(f"fastckpt-run: exit code 75: {ADVICE[75]}\n")


def test_a_worker_that_hung_is_75(jobs: SavingJobs) -> None:
    job = jobs.save("--fast-hang-timeout=1")
    jobs.until_saves(1)
    os.kill(jobs.worker(), signal.SIGSTOP)
    assert "because it hung" in job.ends(75)
    jobs.assert_newest_is_durable()


def test_workers_in_uninterruptible_sleep_are_76(jobs: SavingJobs) -> None:
    jobs.run(jobs.script(STUCK), code=76, TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT="0.5")


def test_a_signal_ends_the_wait_of_torchs_static_rendezvous(jobs: SavingJobs) -> None:
    """That of --nnodes alone, in which torch waits in C++ without a word, for fifteen minutes."""
    port = free_port()
    job = jobs.start("--nnodes=2", f"--master-port={port}", *SHELL, "exit 0")
    line = f"waits at 127.0.0.1:{port} for the other nodes of --nnodes 2"
    until(lambda: line in job.stderr, "a line about them")
    assert "name the first one with --master-addr" in job.stderr
    since = time.monotonic()
    job.terminate()
    assert "fastckpt-run: stopped by SIGTERM" in job.ends(75)
    assert time.monotonic() - since < 10


def test_a_job_whose_storage_fails_ends_with_74_and_the_next_launch_resumes(jobs: SavingJobs) -> None:
    """Two more signals give the flush up."""
    storage = jobs.folder / "storage"
    storage.symlink_to("/proc/self/nowhere")
    job = jobs.save("--fast-flush-timeout=600", script=(f"--path={storage}/model.pt",))
    jobs.until_saves(2)
    job.terminate()
    until(lambda: not Path(f"/proc/{jobs.worker()}").exists(), "the end of the worker")
    job.terminate()
    until(lambda: "1 more to give it up" in job.stderr, "a signal that is counted")
    job.terminate()
    assert f"fastckpt-run: exit code 74: {ADVICE[74]}\n" in job.ends(74)
    last = jobs.saves()[-1]
    storage.unlink()
    storage.mkdir()
    jobs.save(script=("--saves=1",)).ends()
    newest = jobs.saves()[-1]
    assert newest["tier"] == "memory" and newest["loaded"] - last["step"] in (0, 1), newest


def test_a_success_of_ranks_with_a_directory_each_is_1_and_names_both(jobs: SavingJobs) -> None:
    """They load nothing, so that they never compare their directories, and no save comes to be whole."""
    job = jobs.run(*FORK, "--nproc-per-node=2", jobs.script(RANKS_APART), code=1)
    [warned] = [line for line in job.stderr.splitlines() if "Give all ranks one checkpoint directory" in line]
    assert all(f" to {jobs.folder}/rank{rank}" in warned for rank in range(2)), warned
    assert f"none of its saves came to be whole in {jobs.folder}/rank" in job.stderr


@pytest.mark.parametrize(("option", "code"), [("1", 2), ("0", 1)])
def test_a_setting_that_cannot_be_used_is_2(
    here: Path, monkeypatch: pytest.MonkeyPatch, option: str, code: int
) -> None:
    monkeypatch.setenv("FASTCKPT_EXIT_CODES", option)
    with pytest.raises(SystemExit) as end:
        main(["--nnodes=many", "train.py"])
    assert end.value.code == code


class TestNodes:
    def start(self, jobs: SavingJobs, port: int, *arguments: str, backend: str = "c10d", is_host: int = 1) -> Launch:
        place = (f"--rdzv-endpoint=localhost:{port}", f"--rdzv-id={port}", f"--rdzv-backend={backend}")
        conf = f"--rdzv-conf=is_host={is_host},join_timeout=60"
        return jobs.start("--nnodes=2", *place, conf, *arguments, PYTHONPATH=LIGHT)

    def test_a_node_that_waits_in_vain_for_others_or_is_stopped_meanwhile_is_75(self, jobs: SavingJobs) -> None:
        alone = self.start(jobs, free_port(), "--rdzv-conf=join_timeout=1", *SHELL, "exit 0")
        nobody = self.start(jobs, 1, "--rdzv-conf=is_host=0,read_timeout=1", *SHELL, "exit 0")
        stopped = self.start(jobs, port := free_port(), *SHELL, "exit 0")
        waits = until(lambda: stopped.stderr, "a line about the other node")
        assert re.match(rf"fastckpt-run: 1 of 2 nodes have come to \S+:{port}; waiting for the others", waits)
        assert "They need the same --nnodes, --rdzv-id, --rdzv-endpoint and secret (FC-036, " in waits
        stopped.send_signal(signal.SIGINT)
        assert "Traceback" not in stopped.ends(75)
        for job in (alone, nobody):
            job.ends(75)

    @pytest.mark.campaign
    def test_torchs_static_rendezvous_waits_in_vain_or_for_a_first_node_that_comes_late(self, jobs: SavingJobs) -> None:
        """The second node is the first to come, and says whom it does not reach; a second first one is refused."""
        place = ("--nnodes=2", f"--master-port={free_port()}")
        job = jobs.run(*place, "--rdzv-conf=timeout=1", *SHELL, "exit 0", code=75)
        assert "not all of 2 nodes came to 127.0.0.1" in job.stderr
        second = jobs.start(*place, "--node-rank=1", *SHELL, "sleep 1")
        until(lambda: "does not reach the one of --node-rank 0" in second.stderr, "a line of the second node")
        first = jobs.start(*place, *SHELL, "sleep 1")
        first.ends()
        second.ends()
        one = jobs.start(*place, *SHELL, "exit 0")
        until(lambda: "waits at 127.0.0.1" in one.stderr, "the wait of a first node")
        other = jobs.run(*place, *SHELL, "exit 0", code=75)
        assert "the first node cannot hold its store" in other.stderr
        one.terminate()
        one.ends(75)

    @pytest.mark.parametrize(
        ("end", "holds", "backend", "why"),
        [
            ("raise ValueError('bad batch')", 0, "c10d", "rank . died: exit code 1, ValueError: bad batch, in <modu"),
            ("sys.exit(0)", 1, "c10d", "its workers have finished$"),
            ("sys.exit(3)", 0, "c10d-torch", ""),  # its error has no text
        ],
        ids=["raises", "succeeds and held the store", "torch's rendezvous"],
    )
    def test_a_job_that_another_node_has_ended_is_1_and_names_the_node_and_the_cause(
        self, jobs: SavingJobs, end: str, holds: int, backend: str, why: str
    ) -> None:
        """The one whose script has ended has ended it; the other finds that when it would meet it again."""
        port, code = free_port(), int("(0)" not in end)
        scripts = [
            jobs.script(WAIT.format(number, what), f"{number}.py") for number, what in enumerate((end, "exit(4)"))
        ]
        options = ("--fast-preload=math", f"--fast-events={jobs.folder / 'events'}")
        one = self.start(jobs, port, *options, scripts[0], backend=backend, is_host=holds)
        other = self.start(jobs, port, "--max-restarts=3", scripts[1], backend=backend, is_host=1 - holds)
        until(lambda: len([*jobs.folder.glob("up.*")]) == 2, "both workers")
        (jobs.folder / "go.0").touch()
        if code:
            one.ends(code)
        else:  # the agent waits for the other one
            until(lambda: jobs.told("workers_finished"), "the end of the first worker")
        (jobs.folder / "go.1").touch()
        said = f"another node has ended the job, {re.escape(socket.gethostname())}: {why}"
        said = said if why else re.escape(Ending.ENDED_ELSEWHERE.when)
        assert re.search(f"^fastckpt-run: error: {said}", other.ends(1), re.MULTILINE)
        one.ends(code)


def test_the_page_has_the_table_of_the_code() -> None:
    expected = [f"| {ending.when} | {ending.code} | {shown(ending)} |" for ending in Ending]
    found = re.findall(r"^\| .* \| \d+ \| .* \|$", PAGE.read_text(), re.MULTILINE)
    assert found == expected, "\n".join(expected)


def shown(ending: Ending) -> str:
    return f"**{ending.fast}**, or **{NOT_STORED}**" if ending.fast == START_AGAIN else f"**{ending.fast}**"
