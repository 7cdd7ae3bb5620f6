"""Deaths and hangs of templates: the job continues, and no started work is left behind."""

import os
import signal
import subprocess
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fastckpt_run.preload import template_process
from fastckpt_run.preload.orphans import Child, reap, subreaper
from fastckpt_run.preload.preloader import ForkedWorker
from tests.conftest import _with_mark
from tests.e2e.launcher.conftest import LIGHT, Jobs, pids_in, program, until
from tests.e2e.launcher.preloading import Run, Starter, template
from tests.support.json_lines import whole_lines


def children_since(before: Collection[int]) -> list[Child]:
    """The children of this process but for those that fixtures of other tests keep."""
    return [child for child in Child.all() if child.pid not in before]


@pytest.fixture
def before() -> set[int]:
    """The children that this process had before the test."""
    return {child.pid for child in Child.all()}


@pytest.fixture
def starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starter]:
    monkeypatch.setenv("PYTHONPATH", LIGHT)
    monkeypatch.setenv("FRAIL_FILE", str(tmp_path / "struck"))
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(os.getpid(), os.getppid())\n")
    monkeypatch.chdir(tmp_path)
    with template("script.py") as preloader:
        yield Starter(tmp_path, preloader)


def start(starter: Starter) -> Run:
    return starter.start(starter.template, ("script.py",), {})


def templates(agent: int | None = None, before: Collection[int] = ()) -> list[psutil.Process]:
    """The living templates of an agent, by default this process, but for those that it had before a test."""
    found = []
    for child in psutil.Process(agent).children():
        with suppress(psutil.NoSuchProcess):  # a zombie is none for psutil
            if "template.main" in " ".join(child.cmdline()) and child.pid not in before:
                found.append(child)
    return found


@pytest.mark.parametrize("moment", ["import", "request", "middle", "by child", "stop"])
def test_a_template_that_dies_or_stops_is_replaced_and_the_worker_executed(
    moment: str, before: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request
) -> None:
    """The worker is executed then, the next ones are forked from a new template; no child is left over."""
    monkeypatch.setenv("FRAIL", moment)
    monkeypatch.setattr(template_process, "_ANSWER", 1.0)
    starter: Starter = request.getfixturevalue("starter")
    first, second = start(starter), start(starter)
    assert (tmp_path / "struck").exists()
    assert [type(run.handler.proc) for run in (first, second)] == [subprocess.Popen, subprocess.Popen]
    starter.template.prepare()
    third = start(starter)
    assert type(third.handler.proc) is ForkedWorker
    for run in (first, second, third):
        code, out, err = run.wait()
        assert (code, out, err) == (0, f"{run.handler.proc.pid} {os.getpid()}\n", "")
    assert [child.pid for child in children_since(before)] == [child.pid for child in templates(before=before)]
    assert len(templates(before=before)) == 1


def test_a_template_that_always_dies_is_given_up(
    before: set[int], starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "_START", "import sys; sys.exit('no good')")
    for _ in range(6):
        starter.template.prepare()
        for process in templates(before=before):
            process.kill()
        assert start(starter).wait()[0] == 0
    assert not templates(before=before)


def test_orphans_of_workers_are_reaped_and_no_other_children(before: set[int]) -> None:
    """Of what became this process's own: the dead that were born in a worker's session, and only those."""
    mine = subprocess.Popen(["true"])
    with subreaper():
        worker = subprocess.Popen(
            ["sh", "-c", "true & setsid sh -c 'exit 3' & sleep 600 & exit"], start_new_session=True
        )
        until(lambda: len([child for child in children_since(before) if child.dead]) == 4, "the deaths")
    children = children_since(before)
    sleeper = next(child for child in children if not child.dead)
    stranger = next(c for c in children if c.dead and c.session not in (worker.pid, os.getsid(0)))
    reap([worker.pid])
    left = {child.pid for child in children_since(before)}
    assert left == {mine.pid, worker.pid, sleeper.pid, stranger.pid}
    os.kill(sleeper.pid, signal.SIGKILL)
    assert (mine.wait(), worker.wait(), os.waitpid(stranger.pid, 0)[1]) == (0, 0, 3 << 8)
    os.waitpid(sleeper.pid, 0)
    reap([worker.pid])


def test_a_job_whose_templates_and_worker_are_killed_goes_on_with_forks_and_without_survivors(
    jobs: Jobs, tmp_path: Path
) -> None:
    """One before it is ready, one while workers run; the restart after that has forks again.

    Neither the deaf worker, nor children of it or of the dead, live to see the restart: only SIGKILL at once ends them.
    """
    options = ("--nproc-per-node=2", "--max-restarts=1", "--shutdown-timeout=600", "--monitor-interval=5")
    ours = ("--fast-preload=math", f"--fast-events={tmp_path / 'events'}")
    job = jobs.start(*options, *ours, program("family.py"), "deaf", "deaf", PYTHONPATH=LIGHT)
    (first,) = until(lambda: templates(job.pid), "the first template")
    first.kill()
    until(lambda: len([*tmp_path.glob("ready.*")]) == 2, "executed workers")
    until(lambda: jobs.told("preload_ready"), "the second template")
    (second,) = templates(job.pid)
    second.kill()
    until(lambda: len(jobs.told("preload_ready")) == 2, "the third template")
    assert len(pids_in(tmp_path)) == 4
    os.kill(int((tmp_path / "ready.1").read_text()), signal.SIGKILL)
    job.ends()
    assert len(jobs.told("preload_fallback")) == 2
    assert [(tmp_path / f"survivors.{rank}").read_text() for rank in (0, 1)] == ["", ""]
    begin, death = ["rendezvous", "workers_started"], ["worker_died", "worker_failed", "workers_stopped"]
    names = [event["event"] for event in whole_lines(tmp_path / "events")]
    told = [name for name in names if not name.startswith(("preload", "metrics"))]
    assert told == ["job_started", *begin, *death, *begin, "workers_finished", "restarted", "job_ended"]
    (died,) = jobs.told("worker_died")
    assert (died["rank"], died["local_rank"], died["exitcode"]) == (1, 1, -9)
    wait_all_ended()


def test_a_pending_fork_of_a_dead_agent_never_runs_its_script(jobs: Jobs, tmp_path: Path) -> None:
    """The template ends with its agent; a fork that was not let go never runs its script."""
    script = tmp_path / "script.py"
    script.write_text("import os, time\nopen(os.environ['JOB_FOLDER'] + f'/pid.{os.getpid()}', 'w')\ntime.sleep(600)\n")
    driver = """
import os, signal, socket, sys
send = socket.send_fds
def strike(*arguments):
    send(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
socket.send_fds = strike
from fastckpt_run.main import main
main(sys.argv[1:])
"""
    environment = {"PYTHONPATH": LIGHT, "FRAIL": "middle forked", "FRAIL_FILE": str(tmp_path / "struck")}
    jobs.run("--fast-preload=math", str(script), launcher=driver, code=-signal.SIGKILL, **environment)
    wait_all_ended()
    assert not pids_in(tmp_path), "the script ran"


def wait_all_ended() -> None:
    """Wait for the end of all that an agent had started, whatever their numbers."""
    mark = f"TEST_MARK={os.environ['TEST_MARK']}\0".encode()
    until(lambda: not _with_mark(mark), "the end of all")
