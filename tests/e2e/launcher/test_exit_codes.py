"""--fast-exit-codes: each cause of the agent's end, in a real launch, and the page that has the table of them."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt_run.exit_codes import ADVICE, BAD_NODE, NOT_STORED, START_AGAIN, Ending
from fastckpt_run.failures.deaths import is_from_outside
from tests.e2e.launcher.conftest import program, until
from tests.support import launchers
from tests.support.json_lines import whole_lines
from tests.support.live_folders import remove_live
from tests.support.ports import free_port

PAGE = Path(__file__).parents[3] / "docs/reference/exit_codes.md"
SAVE = program("save.py")
FAST = "--fast-exit-codes"
SHELL = ("--no-python", "sh", "-c")
"""A command; torch replaces $$ by $ in it."""
WAIT = """
import pathlib, sys, time
pathlib.Path("{0}/up.{1}").touch()
while not pathlib.Path("{0}/go.{1}").exists():
    time.sleep(0.05)
{2}
"""
STUCK = """
import ctypes, os
libc = ctypes.CDLL(None)  # which holds the lock of Python's interpreter no more while it waits: state D
if libc.vfork() == 0:
    libc.sleep(600)
    libc._exit(0)
"""


class Launch:
    """Launches of the command with the option in a folder; what they print is in its file ``output``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, **environment: str) -> "subprocess.Popen[bytes]":
        own = {"JOB_FOLDER": str(self.folder), "TMPDIR": str(self.folder), "FASTCKPT_EXIT_CODES": "1"}
        with self.output.open("ab") as output:
            command = ["-m", "fastckpt_run", "--nproc-per-node=1", *arguments]
            self.started.append(launchers.start(command, os.environ | own | environment, output.fileno()))
        return self.started[-1]

    def save(self, *arguments: str, options: Sequence[str] = (), **environment: str) -> "subprocess.Popen[bytes]":
        """Start a worker that saves, to memory alone if it does not say more; ``options`` are the launcher's."""
        place = f"--directory={self.folder}/checkpoints"
        return self.start(*options, SAVE, place, "--pause=0.1", "--disk=0", *arguments, **environment)

    def run(self, *arguments: str, **environment: str) -> int:
        return self.start(*arguments, **environment).wait(120)

    @property
    def output(self) -> Path:
        return self.folder / "output"

    @property
    def text(self) -> str:
        return self.output.read_text()

    def saves(self) -> list[dict[str, Any]]:
        return whole_lines(self.folder / "saves")

    def until_saves(self, count: int) -> None:
        until(lambda: len(self.saves()) >= count, f"{count} saves")

    def durable(self) -> list[int]:
        return [stored.id.step for stored in CheckpointDirectory(self.folder / "checkpoints").checkpoints()]

    def is_newest(self, step: object) -> bool:
        """Whether a step is that of the newest save, which the worker may not have come to log."""
        return isinstance(step, int) and step - self.saves()[-1]["step"] in (0, 1)

    def resumed_from_memory(self, last: dict[str, Any]) -> bool:
        """Whether the newest save was loaded, one that was logged as ``last``, or the one after it."""
        newest = self.saves()[-1]
        return newest["tier"] == "memory" and newest["loaded"] - last["step"] in (0, 1)

    def worker(self) -> int:
        return max(int(path.suffix[1:]) for path in self.folder.glob("pid.*"))


@pytest.fixture
def launch(tmp_path: Path, forked_launchers: None) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    for each in launch.started:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)
            each.wait()


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder that storage refuses, as long as its link leads nowhere."""
    (tmp_path / "storage").symlink_to("/proc/self/nowhere")
    return tmp_path / "storage"


def mend(broken: Path) -> None:
    broken.unlink()
    broken.mkdir()


def assert_resumed_once_mended(launch: "Launch", broken: Path) -> None:
    """The next launch resumes from memory what could not be stored."""
    last = launch.saves()[-1]
    mend(broken)
    assert launch.save("--saves=1").wait(120) == 0
    assert launch.resumed_from_memory(last), launch.text


@pytest.mark.parametrize("number", [*signal.Signals], ids=lambda number: number.name)
def test_signals_for_what_a_process_does_itself_are_no_cause_from_outside(number: signal.Signals) -> None:
    own = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"}
    assert is_from_outside(-number) == (number.name not in own)
    assert not is_from_outside(int(number))


class TestWorkers:
    def test_success_is_0(self, launch: Launch) -> None:
        assert launch.run(*SHELL, "exit 0") == Ending.SUCCEEDED.fast == 0

    @pytest.mark.parametrize("end", ["exit 3", "kill -SEGV $$$$"])
    def test_a_failure_of_the_script_itself_is_1(self, launch: Launch, end: str) -> None:
        assert launch.run(*SHELL, end) == Ending.SCRIPT.fast == 1
        assert "exit code" not in launch.text.splitlines()[-1]

    @pytest.mark.parametrize("name", ["KILL", "TERM"])
    def test_a_worker_that_was_killed_from_outside_is_75(self, launch: Launch, name: str) -> None:
        assert launch.run("--max-restarts=1", *SHELL, f"kill -{name} $$$$") == Ending.LOST_WORKERS.fast == 75
        assert launch.text.endswith(f"fastckpt-run: exit code 75: {ADVICE[75]}\n")

    def test_the_same_without_the_option_is_1(self, launch: Launch) -> None:
        assert launch.run(*SHELL, "kill -KILL $$$$", FASTCKPT_EXIT_CODES="0") == Ending.LOST_WORKERS.code == 1
        assert "exit code 75" not in launch.text

    def test_a_worker_that_hung_is_75(self, launch: Launch) -> None:
        job = launch.save("--saves=500", options=["--fast-hang-timeout=2"])
        launch.until_saves(1)
        os.kill(launch.worker(), signal.SIGSTOP)
        assert job.wait(120) == 75, launch.text
        assert "because it hung" in launch.text and launch.is_newest(launch.durable()[0])

    def test_a_worker_that_is_killed_again_and_again_without_progress_is_1(self, launch: Launch) -> None:
        """Another launch would go the same way."""
        script = launch.folder / "killed.py"
        script.write_text(
            "import os, signal, torch\n"
            "from fastckpt import DdpCheckpointer\n"
            "checkpointer = DdpCheckpointer(os.environ['JOB_FOLDER'] + '/checkpoints')\n"
            "checkpointer.load_checkpoint()\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        assert launch.run("--max-restarts=20", "--fast-max-stalls=1", str(script)) == 1
        assert "no restart: the workers failed 10 times in a row before they came further" in launch.text

    def test_workers_in_uninterruptible_sleep_are_76(self, launch: Launch) -> None:
        script = launch.folder / "stuck.py"
        script.write_text(STUCK)
        limit = {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "0.5"}
        assert launch.run(str(script), **limit) == Ending.STUCK.fast == BAD_NODE, launch.text

    def test_a_worker_killed_while_storage_fails_is_74_and_the_next_launch_resumes(
        self, launch: Launch, broken: Path
    ) -> None:
        job = launch.save("--saves=500", f"--path={broken}/model.pt", options=["--fast-flush-timeout=1"])
        launch.until_saves(2)
        os.kill(launch.worker(), signal.SIGKILL)
        assert job.wait(120) == NOT_STORED == 74, launch.text
        assert_resumed_once_mended(launch, broken)


class TestSignals:
    @pytest.mark.parametrize(
        "number",
        [
            pytest.param(signal.SIGTERM, marks=pytest.mark.campaign),
            signal.SIGINT,
            pytest.param(signal.SIGHUP, marks=pytest.mark.campaign),
        ],
        ids=lambda each: each.name,
    )
    def test_a_signal_after_which_all_is_stored_is_75(self, launch: Launch, number: signal.Signals) -> None:
        job = launch.save("--saves=500")
        launch.until_saves(2)
        job.send_signal(number)
        assert job.wait(120) == Ending.STOPPED.fast == START_AGAIN, launch.text
        assert launch.is_newest(launch.durable()[0])

    def test_a_signal_to_agent_and_workers_at_once_is_75(self, launch: Launch) -> None:
        """As Slurm sends it to all processes of a step: workers may end before the agent reads its own."""
        job = launch.save("--saves=500", options=["--max-restarts=3"])
        launch.until_saves(2)
        os.kill(launch.worker(), signal.SIGTERM)
        job.send_signal(signal.SIGTERM)
        assert job.wait(120) == 75, launch.text
        assert launch.is_newest(launch.durable()[0])

    def test_a_signal_while_the_agent_waits_for_other_nodes_is_75(self, launch: Launch) -> None:
        port = free_port()
        job = launch.start("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", *SHELL, "exit 0")
        until(lambda: "waiting" in launch.text or job.poll() is not None, "a line about the other node")
        job.send_signal(signal.SIGTERM)
        assert job.wait(120) == 75, launch.text

    @pytest.mark.parametrize(
        ("name", "option", "code"),
        [("INT", "0", 1), ("INT", "1", 75), ("TERM", "0", -signal.SIGTERM), ("TERM", "1", 75)],
    )
    def test_a_signal_ends_the_wait_of_torchs_static_rendezvous(
        self, launch: Launch, name: str, option: str, code: int
    ) -> None:
        """That of --nnodes alone, in which torch waits in C++ without a word, for fifteen minutes."""
        port = free_port()
        job = launch.start("--nnodes=2", f"--master-port={port}", *SHELL, "exit 0", FASTCKPT_EXIT_CODES=option)
        until(
            lambda: f"waits at 127.0.0.1:{port} for the other nodes of --nnodes 2" in launch.text, "a line about them"
        )
        assert "name the first one with --master-addr" in launch.text
        since = time.monotonic()
        job.send_signal(getattr(signal, f"SIG{name}"))
        assert job.wait(120) == code, launch.text
        print(f"ended after {time.monotonic() - since:.2f} s")
        assert time.monotonic() - since < 10
        assert (f"fastckpt-run: stopped by SIG{name}" in launch.text) == (code > 0)

    def test_a_signal_while_storage_fails_is_74_and_the_next_launch_resumes(self, launch: Launch, broken: Path) -> None:
        """Whether the flush ran into its limit, or two more signals gave it up."""
        for signals in (1, 3):
            limit = "--fast-flush-timeout=1" if signals == 1 else "--fast-flush-timeout=600"
            count = len(launch.saves())
            job = launch.save("--saves=500", f"--path={broken}/model.pt", options=[limit])
            launch.until_saves(count + 2)
            job.send_signal(signal.SIGTERM)
            for left in range(signals - 1, 0, -1):
                until(lambda left=left: left == 2 or "1 more to give it up" in launch.text, "a signal that is counted")
                until(lambda: not Path(f"/proc/{launch.worker()}").exists(), "the end of the worker")
                job.send_signal(signal.SIGTERM)
            assert job.wait(120) == NOT_STORED, launch.text
            assert launch.text.endswith(f"fastckpt-run: exit code 74: {ADVICE[74]}\n")
        assert_resumed_once_mended(launch, broken)

    def test_three_signals_before_the_workers_have_ended_are_74(self, launch: Launch, broken: Path) -> None:
        """As Ctrl-C again and again, while a worker does not react: what gives up the flush comes before it begins."""
        deaf = ("--saves=5000", "--deaf")  # one that is stopped is continued first, and may end before the next signal
        job = launch.save(*deaf, f"--path={broken}/model.pt", options=["--fast-flush-timeout=600"])
        launch.until_saves(2)
        os.kill(launch.worker(), signal.SIGSTOP)
        for count in range(3):
            until(lambda count=count: launch.text.count("closing signal") >= count, "a try to end the worker")
            job.send_signal(signal.SIGTERM)
        assert job.wait(120) == NOT_STORED, launch.text
        # a worker that is continued may still say that the agent is gone
        assert f"fastckpt-run: exit code 74: {ADVICE[74]}\n" in launch.text
        assert_resumed_once_mended(launch, broken)


class TestJobs:
    def test_a_success_that_is_not_durable_is_74_with_the_option_and_75_without(
        self, launch: Launch, broken: Path
    ) -> None:
        path, options = f"--path={broken}/model.pt", ["--fast-require-persist", "--fast-flush-timeout=1"]
        job = launch.save("--saves=1", path, options=options, FASTCKPT_EXIT_CODES="0")
        assert job.wait(120) == Ending.NOT_DURABLE.code == 75, launch.text
        assert launch.save("--saves=1", path, options=options).wait(120) == Ending.NOT_DURABLE.fast == 74, launch.text
        mend(broken)
        assert launch.save("--saves=0").wait(120) == 0

    def test_a_success_of_ranks_with_a_directory_each_is_1_and_names_both(self, launch: Launch) -> None:
        """They load nothing, so that they never compare their directories, and no save comes to be whole."""
        code = launch.run("--nproc-per-node=2", program("directory_per_rank.py"))
        assert code == Ending.NEVER_WHOLE.fast == Ending.NEVER_WHOLE.code == 1, launch.text
        [warned] = [line for line in launch.text.splitlines() if "Give all ranks one checkpoint directory" in line]
        assert all(f" to {launch.folder}/rank{rank}" in warned for rank in range(2)), warned
        assert f"none of its saves came to be whole in {launch.folder}/rank" in launch.text

    @pytest.mark.campaign
    def test_a_job_whose_directory_another_takes_over_is_1(self, launch: Launch) -> None:
        own = Path(os.environ["FASTCKPT_SHM_DIR"]) / "another host"
        own.mkdir(mode=0o700)
        job = launch.save("--saves=1000", "--disk=1", options=["--max-restarts=3"])
        launch.until_saves(2)
        taker = launch.save("--saves=1000", options=["--fast-take-over", "--max-restarts=3"], FASTCKPT_SHM_DIR=str(own))
        assert job.wait(120) == Ending.TAKEN_OVER.fast == 1, launch.text
        assert "has been taken by another job" in launch.text
        taker.send_signal(signal.SIGTERM)
        assert taker.wait(120) == 75, launch.text
        own.rmdir()
        for arena in own.parent.iterdir():
            remove_live(arena)  # that of the one which was ended is kept

    def test_a_setting_that_cannot_be_used_is_2(self, launch: Launch) -> None:
        assert launch.run("--fast-slots=9", "train.py") == Ending.SETTING.fast == 2
        assert launch.run("--nnodes=many", "train.py") == Ending.REFUSED.fast == 2
        assert launch.run("--nnodes=many", "train.py", FASTCKPT_EXIT_CODES="0") == Ending.REFUSED.code == 1

    def test_an_error_of_the_launcher_is_1(self, launch: Launch) -> None:
        assert launch.run("--nnodes=2", "--rdzv-backend=etcd", "--rdzv-endpoint=localhost:1", SAVE) == 1
        assert Ending.FAULT.fast == 1


class TestNodes:
    def start(self, launch: Launch, port: int, *arguments: str, backend: str = "c10d") -> "subprocess.Popen[bytes]":
        place = (f"--rdzv-endpoint=localhost:{port}", f"--rdzv-id={port}", f"--rdzv-backend={backend}")
        return launch.start("--nnodes=2", *place, *arguments)

    def test_a_node_that_waits_in_vain_for_others_is_75(self, launch: Launch) -> None:
        alone = self.start(launch, free_port(), "--rdzv-conf=join_timeout=1", *SHELL, "exit 0")
        assert alone.wait(120) == Ending.LACKS_NODES.fast == 75, launch.text
        nobody = self.start(launch, 1, "--rdzv-conf=is_host=0,read_timeout=1", *SHELL, "exit 0")
        assert nobody.wait(120) == 75, launch.text

    def test_torchs_static_rendezvous_waits_in_vain_or_for_a_first_node_that_comes_late(self, launch: Launch) -> None:
        """The second node is the first to come, and says whom it does not reach; a second first one is refused."""
        place = ("--nnodes=2", f"--master-port={free_port()}")
        assert launch.start(*place, "--rdzv-conf=timeout=2", *SHELL, "exit 0").wait(120) == 75, launch.text
        assert "not all of 2 nodes came to 127.0.0.1" in launch.text
        second = launch.start(*place, "--node-rank=1", *SHELL, "sleep 3")
        until(lambda: "does not reach the one of --node-rank 0" in launch.text, "a line of the second node")
        first = launch.start(*place, *SHELL, "sleep 3")
        assert [first.wait(120), second.wait(120)] == [0, 0], launch.text
        one = launch.start(*place, *SHELL, "exit 0")
        until(lambda: launch.text.count("waits at 127.0.0.1") == 1, "the wait of a first node")
        assert launch.start(*place, *SHELL, "exit 0").wait(120) == Ending.LACKS_NODES.fast, launch.text
        assert "the first node cannot hold its store" in launch.text
        one.send_signal(signal.SIGTERM)
        assert one.wait(120) == 75, launch.text

    @pytest.mark.parametrize(
        ("end", "holds", "why"),
        [
            ("raise ValueError('bad batch')", False, "rank . died: exit code 1, ValueError: bad batch, in <module> "),
            ("sys.exit(3)", True, "rank . died: exit code 3$"),
            ("sys.exit(0)", False, "its workers have finished$"),
        ],
        ids=["raises", "exits and held the store", "succeeds"],
    )
    def test_a_job_that_another_node_has_ended_is_1_and_names_the_node_and_the_cause(
        self, launch: Launch, end: str, holds: bool, why: str
    ) -> None:
        """The one whose script has ended has ended it; the other finds that when it would meet it again."""
        port, events, code = free_port(), launch.folder / "events", int("(0)" not in end)
        (launch.folder / "one.py").write_text(WAIT.format(launch.folder, 1, end))
        (launch.folder / "other.py").write_text(WAIT.format(launch.folder, 2, "sys.exit(4)"))
        host, options = "--rdzv-conf=is_host={:d}".format, ("--fast-preload=math", f"--fast-events={events}")
        one = self.start(launch, port, host(holds), *options, f"{launch.folder}/one.py")
        other = self.start(launch, port, host(not holds), "--max-restarts=3", f"{launch.folder}/other.py")
        until(lambda: len([*launch.folder.glob("up.*")]) == 2, "both workers")
        (launch.folder / "go.1").touch()
        if code:
            assert one.wait(120) == code, launch.text
        else:  # the agent waits for the other one
            until(lambda: '"workers_finished"' in events.read_text(), "the end of the first worker")
        (launch.folder / "go.2").touch()
        assert other.wait(120) == Ending.ENDED_ELSEWHERE.fast == 1, launch.text
        assert one.wait(120) == code, launch.text
        told = f"^fastckpt-run: error: another node has ended the job, {re.escape(socket.gethostname())}: {why}"
        assert re.search(told, launch.text, re.MULTILINE), launch.text

    def test_a_node_whose_workers_lost_those_of_another_names_the_cause_there(self, launch: Launch) -> None:
        """Both have no restart left, and end at the same time."""
        port, script = free_port(), launch.folder / "train.py"
        script.write_text(
            "import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
            "for step in range(100):\n    if step == 5 and dist.get_rank() == 1: raise ValueError('bad batch')\n"
            "    dist.all_reduce(torch.ones(1))\n"
        )
        nodes = [self.start(launch, port, "--fast-preload=auto", str(script)) for _ in range(2)]
        assert [node.wait(120) for node in nodes] == [Ending.SCRIPT.fast] * 2, launch.text
        first = (
            f"another node has ended the job, {re.escape(socket.gethostname())}: rank 1 died: exit code 1, ValueError"
        )
        told = f"^fastckpt-run: {first}: bad batch, in <module> .*; then rank 0 died on .*; not restarted"
        assert re.search(told, launch.text, re.MULTILINE), launch.text

    def test_a_job_that_another_node_has_ended_says_so_with_torchs_rendezvous(self, launch: Launch) -> None:
        """Whose error has no text."""
        port = free_port()
        for number in (1, 2):
            (launch.folder / f"{number}.py").write_text(WAIT.format(launch.folder, number, "sys.exit(4)"))
        host, way = "--rdzv-conf=is_host={:d}".format, {"backend": "c10d-torch"}
        one = self.start(launch, port, host(False), f"{launch.folder}/1.py", **way)
        other = self.start(launch, port, host(True), "--max-restarts=3", f"{launch.folder}/2.py", **way)
        until(lambda: len([*launch.folder.glob("up.*")]) == 2, "both workers")
        (launch.folder / "go.1").touch()
        assert one.wait(120) == Ending.SCRIPT.fast, launch.text
        (launch.folder / "go.2").touch()
        assert other.wait(120) == Ending.ENDED_ELSEWHERE.fast, launch.text
        assert f"fastckpt-run: error: {Ending.ENDED_ELSEWHERE.when}\n" in launch.text

    def test_a_node_that_fails_its_check_is_76(self, launch: Launch) -> None:
        code = launch.run("--fast-node-check", f"--fast-shm-dir={launch.folder}", "train.py")
        assert code == Ending.NODE_CHECK.fast == 76
        assert launch.text.endswith(f"fastckpt-run: exit code 76: {ADVICE[76]}\n")


def row(cells: list[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def test_the_page_has_the_table_of_the_code() -> None:
    expected = [row([ending.when, ending.code, code(ending)]) for ending in Ending]
    found = re.findall(r"^\| .* \| \d+ \| .* \|$", PAGE.read_text(), re.MULTILINE)
    assert found == expected, "\n".join(expected)


def code(ending: Ending) -> str:
    return f"**{ending.fast}**, or **{NOT_STORED}**" if ending.fast == START_AGAIN else f"**{ending.fast}**"


def test_each_cause_has_words_and_a_test_of_its_own(request: pytest.FixtureRequest) -> None:
    tests = Path(__file__).read_text()
    assert len({ending.when for ending in Ending}) == len(Ending)
    assert not [ending.name for ending in Ending if f"Ending.{ending.name}." not in tests]
