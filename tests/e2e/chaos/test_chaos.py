"""`fastckpt chaos` (docs/operate/chaos.md): kills in a real job, what comes back, jobs in which it refuses to kill."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fastckpt import DdpCheckpointer
from fastckpt._core import metrics
from fastckpt._core.memory.processes import Process, boot_id, signal_together
from fastckpt._core.report.events import FOLDER
from fastckpt_run.chaos.running_job import LocalAgent, agents_of, find_job
from tests.cli.conftest import Fastckpt, Said
from tests.cli.test_output import KEYS
from tests.e2e.chaos.conftest import ChaosJob, stopped_after
from tests.support.waits import until

SHM = "FASTCKPT_SHM_DIR"
NOBODY = 65534
KILL = {
    "number", "kind", "rank", "pids", "at", "step", "held", "held_in", "seconds", "resumed", "tiers", "fresh", "lost",
    "digests", "digests_of", "restarts_left", "trouble", "stopped", "came_back", "fault",
}  # fmt: skip


def agents(job: ChaosJob) -> list[LocalAgent]:
    return agents_of(str(job.directory), Path(os.environ[SHM]))


def begun(job: ChaosJob) -> list[LocalAgent]:
    until(lambda: (each := agents(job)) and all(rank.step >= 2 for rank in each[0].telemetry()), "the first save")
    return agents(job)


def chaos(fastckpt: Fastckpt, job: ChaosJob, *options: object) -> Said:
    return fastckpt("chaos", job.directory, "--every=0.3s", "--limit=100s", *options)


def test_a_job_comes_back_from_each_kill_and_all_of_it_is_told(fastckpt: Fastckpt, job: ChaosJob):
    job.start()
    [agent] = begun(job)
    # 1. workers   2. again, for people   3. the agent, started again by somebody   4. workers, until no restart is left
    said = chaos(fastckpt, job, "--kill=rank", "--count=2", "--seed=1", "--json")
    document = said.document
    assert set(document) == set(KEYS["chaos"]) and document["job"] is None
    assert said.code == 0 and document["came_back"] == 2 and not document["faults"] and not document["warnings"]
    assert document["tiers"] == {"memory": 2} and document["ended"] == "2 kills are made"
    for kill in document["kills"]:
        assert set(kill) == KILL and kill["digests"] == "equal" and kill["seconds"] > 0 and kill["rank"] in (0, 1)
        assert (kill["resumed"]["history"], kill["resumed"]["step"]) >= (kill["held"]["history"], kill["held"]["step"])
        assert 0 <= kill["lost"] <= 6 and agent.process.pid not in kill["pids"] and len(kill["pids"]) == 1
    assert [kill["restarts_left"] for kill in document["kills"]] == [8, 7]

    said = chaos(fastckpt, job, "--kill=rank", "--count=1", "--signal=segv")
    assert said.code == 0 and "kill 1: rank " in said.out and "in memory, " in said.out and "bytes equal" in said.out
    assert "came back" in said.out and "bytes equal to what was saved" in said.out
    until(lambda: "SIGSEGV" in job.text(), "the launcher's report")

    workers = {worker.pid for worker in agents(job)[0].workers}
    again = threading.Thread(target=lambda: (until(lambda: not agents(job), "the death"), job.start(restarts=1)))
    again.start()
    said = chaos(fastckpt, job, "--kill=agent", "--count=1", "--json")
    again.join()
    [kill] = said.document["kills"]
    assert said.code == 0 and kill["pids"] == [agent.process.pid] and kill["tiers"] == ["memory"]
    assert "starts a killed agent again" in said.document["warnings"][0] and "warning: nobody but you" in said.err

    begun(job)
    assert not workers & {worker.pid for worker in agents(job)[0].workers}
    logs = job.directory / ".fastckpt" / "events"
    until(
        lambda: [b"job_started" in log.read_bytes() for log in logs.glob("*")] == 2 * [True],
        "its log, which names restarts",
    )
    said = chaos(fastckpt, job, "--kill=rank", "--count=3")
    assert "the job has 1 restart left for 3 kills" in said.err and "--max-restarts N" in said.err
    assert said.code == 1 and "kill 2: rank " in said.out and "NOT BACK: the job has ended: failed" in said.out
    assert job.wait() == 1
    said = chaos(fastckpt, job, "--kill=rank")
    assert said.code == 2 and "no job runs with" in said.err and "the last one has ended (failed" in said.err


def test_signals_to_chaos_and_a_lost_host_end_it_with_a_summary_also_without_an_event_log(
    fastckpt: Fastckpt, job: ChaosJob, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FASTCKPT_EVENT_LOG", "0")
    job.start(ranks=1)
    [agent] = begun(job)
    with stopped_after(lambda: agents(job)[0].telemetry()[0].generation, signal.SIGINT):
        said = fastckpt("chaos", job.directory, "--kill=rank", "--every=2s", "--json")
    assert said.code == 0 and said.document["ended"] == "stopped by Ctrl-C"
    first = said.document["kills"][0]
    assert first["came_back"] and first["resumed"]["step"] >= first["held"]["step"]
    assert first["resumed"]["history"] is None and not first["tiers"] and first["restarts_left"] is None
    assert agents(job)[0].process == agent.process

    pids = {agent.process.pid, agents(job)[0].workers[0].pid}
    said = fastckpt("chaos", job.directory, "--every=0.1s", "--limit=1s", "--kill=node", "--json")
    [kill] = said.document["kills"]
    assert said.code == 1 and set(kill["pids"]) == pids and kill["fault"] == "no new agent came in 1 s"
    assert said.document["ended"] == "nothing came back after the last kill"

    job.start(ranks=1)
    begun(job)
    with stopped_after(lambda: not agents(job), signal.SIGTERM):
        said = chaos(fastckpt, job, "--kill=node")
    assert said.code == 128 + signal.SIGTERM
    assert "not waited for" in said.out and "NOT BACK" not in said.out
    assert fastckpt("shm", "clean", "--force", "--yes").code == 0


# --- jobs that are not one's own to kill


def refusal(fastckpt: Fastckpt, directory: Path) -> str:
    said = fastckpt("chaos", directory, "--kill=rank", "--every=1s")
    assert said.code == 2 and not said.out
    return said.err


def leave_begin(directory: Path, **fields: Any) -> None:
    """The log of a launch that has begun and not ended."""
    (directory / FOLDER).mkdir(parents=True)
    event = metrics.stamp("job_started") | {"host": socket.gethostname(), "boot": boot_id()} | fields
    (directory / FOLDER / f"000001-host-{event['pid']}.jsonl").write_bytes(metrics.to_line(event))


def test_jobs_that_are_not_ones_own_to_kill_are_refused_with_the_reason(fastckpt: Fastckpt, tmp_path: Path):
    """None is there; one runs on another host; one was killed; one has no agent."""
    assert "no job of this user runs on" in refusal(fastckpt, tmp_path)
    assert "is no directory" in refusal(fastckpt, tmp_path / "none")
    elsewhere, killed, alone = (tmp_path / name for name in ("elsewhere", "killed", "alone"))
    leave_begin(elsewhere, host="gpu17")
    assert f"the job with {elsewhere} runs on gpu17: run this there" in refusal(fastckpt, elsewhere)
    gone = subprocess.Popen(["true"])
    gone.wait()
    leave_begin(killed, pid=gone.pid)
    assert f"the last one (process {gone.pid}) was killed" in refusal(fastckpt, killed)
    with DdpCheckpointer(alone):
        assert f"process {os.getpid()} keeps its memory itself" in refusal(fastckpt, alone)


@pytest.mark.skipif(os.getuid() != 0, reason="takes root, to have a process of another user")
def test_a_job_of_another_user_is_refused_with_the_name(fastckpt: Fastckpt, tmp_path: Path):
    stranger = subprocess.Popen(["sleep", "60"], user=NOBODY)
    try:
        leave_begin(tmp_path, pid=stranger.pid)
        said = refusal(fastckpt, tmp_path)
        assert f"(process {stranger.pid}) belongs to user nobody" in said or f"user {NOBODY}" in said
        assert stranger.poll() is None and not signal_together([Process.of(stranger.pid)], signal.SIGKILL)
    finally:
        stranger.kill()
        stranger.wait()


OWNER = """
import sys, time
from pathlib import Path
from fastckpt._core.memory.arena import Arena, arena_path
arena = Arena.open(arena_path(sys.argv[1], sys.argv[2], int(sys.argv[3])), sys.argv[2], sys.argv[3])
print("here", flush=True)
sys.stdin.read()
arena.remove()
"""


def test_a_directory_with_two_jobs_is_refused(fastckpt: Fastckpt, tmp_path: Path):
    command = [sys.executable, "-c", OWNER, os.environ[SHM], str(tmp_path)]
    owners = [
        subprocess.Popen([*command, number], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in "01"
    ]
    try:
        for owner in owners:
            assert owner.stdout is not None and owner.stdout.readline() == "here\n"
        said = refusal(fastckpt, tmp_path)
        assert "two jobs save to" in said and all(str(owner.pid) in said for owner in owners)
        # Of two nodes of one job on a host, as in tests, one is chosen each time.
        for owner in owners:
            (tmp_path / FOLDER).mkdir(parents=True, exist_ok=True)
            event = metrics.stamp("job_started") | {"pid": owner.pid, "run_id": "one"}
            (tmp_path / FOLDER / f"000001-host-{owner.pid}.jsonl").write_bytes(metrics.to_line(event))
        assert len(find_job(str(tmp_path), os.environ[SHM]).agents) == 2
    finally:
        for owner in owners:
            owner.communicate("", timeout=30)


def test_a_signal_hits_no_process_that_has_the_number_of_another():
    with subprocess.Popen(["sleep", "60"]) as child:
        known, own = Process.of(child.pid), Process.current()
        former = Process(known.pid, known.ticks - 1, known.boot, known.namespace)
        elsewhere = Process(known.pid, known.ticks, known.boot, known.namespace + 1)
        assert signal_together([former, elsewhere, own], signal.SIGKILL) == [] and child.poll() is None
        assert signal_together([former, known], signal.SIGTERM) == [known] and child.wait() == -signal.SIGTERM
