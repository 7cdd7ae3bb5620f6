"""A container is killed, and another one takes its place: the memory of the pod is there, the processes are others."""

import os
import signal
from pathlib import Path

import pytest
import yaml

from tests.containers.conftest import ContainerJob
from tests.containers.containers import python
from tests.faults.faults import stop, to_text
from tests.faults.jobs import HERE, Job, assert_as_if_nothing_had_happened

ROOT = Path(__file__).parents[2]
NEVER = ("--disk", "1000")
pytestmark = pytest.mark.campaign


def test_a_job_survives_its_containers_one_killed_amid_a_save_one_amid_a_persist_and_one_that_was_not_gone(
    job: ContainerJob, uninterrupted
) -> None:
    reference = uninterrupted()
    job.with_faults(stop(0, "snapshot.fill", 18))
    (job.folder / "faults").write_text(to_text(job.faults))
    # 1. killed amid a save: rank 0 stands still in its copy, and storage has what is older
    first = job.begin()
    job.until(lambda: job.injected() == 1, "the copy")
    job.until(lambda: job.stored() == [10], "step 10 on storage")
    first.kill()
    for _ in range(3):  # so that the next one gets another number for its pid namespace than the last
        job.pod.start("sleep", "1000", output=job.output, environment=os.environ)
    # 2. another host name, and amid a persist: 40 MB at 1 MB/s
    slow = python("-m", "fastckpt_run", "--fast-persist-mbps", "1")
    second = job.begin("--ballast", "40", "--stop-at", "22", launcher=slow, name="train-1")
    job.wait_for("saved", 22)
    # 3. the next container begins while that one still runs, and waits
    job.begin(name="train-1")
    job.until(lambda: "of another pid namespace on train-1" in job.text(), "the next one waits")
    assert "it saves to" in job.text() and len(job.starts()) == 2, "it has no workers until the memory is free"
    second.kill()
    assert job.stored() == [10], "the persist of step 20 was under way"
    assert job.wait() == 0, job.text()
    assert job.tiers() == [(16, "memory"), (22, "memory")]
    assert_as_if_nothing_had_happened(job, reference)
    assert "killed processes" not in job.text() and not job.held()


IN_A_CONTAINER = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


def test_two_pods_run_the_command_of_the_manifest_and_one_whose_container_is_killed_comes_back_with_its_memory(
    tmp_path: Path, new_cluster, uninterrupted
) -> None:
    reference, job = uninterrupted(), Job(tmp_path / "job")
    cluster = new_cluster(0, 1)
    [_, manifest] = yaml.safe_load_all((ROOT / "examples/kubernetes/indexed_job.yaml").read_text())
    secret = job.folder / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o400)
    command = manifest["spec"]["template"]["spec"]["containers"][0]["command"][1 : -len(("script", "argument"))]
    ours = {"$(JOB)-0.$(JOB),$(JOB)-1.$(JOB)": "node0,node1", "per-node=2": "per-node=1"}
    for text, value in (ours | {"/etc/fastckpt/secret": str(secret)}).items():
        assert text in str(command)
        command = [each.replace(text, value) for each in command]
    script = (str(HERE / "train.py"), "--out", str(job.folder), "--checkpoint-dir", str(job.checkpoint_dir))
    spaces = ("unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
    line = ["-c", IN_A_CONTAINER, *spaces, *python("-m", "fastckpt_run"), *command, *script, *NEVER, "--wait-at", "20"]
    start = {"output": job.output, "FAULTS_LAUNCH": "1"}
    processes = [cluster.hosts[number].start(*line, **start) for number in range(2)]
    job.wait_for_all(20)
    first, *_ = cluster.hosts[1].run("pgrep", "-f", "^[^ ]*python -m fastckpt_run").split()
    cluster.hosts[1].run("kill", "-KILL", first)  # process 1 of the container: all others of it die as well
    processes[1].wait(60)
    job.go_on(20)
    processes[1] = cluster.hosts[1].start(*line, **start)
    assert [each.wait(120) for each in processes] == [0, 0], job.text()
    assert job.resumes()[1:] == [(20, "memory")] == job.resumes(1)[1:]
    assert_as_if_nothing_had_happened(job, reference)


ORPHANS = """
import os, pathlib, sys, time
for _ in range(3):
    if not (child := os.fork()):
        if not os.fork():
            time.sleep(0.05)  # an orphan by then
        os._exit(0)
    os.waitpid(child, 0)
end = time.monotonic() + 10
time.sleep(0.1)
while time.monotonic() < end:
    states = [path.read_text().rpartition(")")[2].split()[:2] for path in pathlib.Path("/proc").glob("[0-9]*/stat")]
    if not (left := states.count(["Z", "1"])):
        break
    time.sleep(0.02)
report = pathlib.Path(sys.argv[1])
report.with_suffix(".new").write_text(f"{left} zombies")
report.with_suffix(".new").rename(report)
time.sleep(600)
"""
"""A script that leaves orphans, and waits until the first process of its container has reaped them."""


def test_a_container_reaps_orphans_and_ends_by_a_signal_before_it_has_workers(job: ContainerJob) -> None:
    report, events = job.folder / "report", job.folder / "waiting-events"
    script = job.folder / "orphans.py"
    script.write_text(ORPHANS)
    run = (str(script), str(report))
    container = job.launch([*python("-m", "fastckpt_run"), "--standalone", "--fast-no-preload", *run])
    job.until(report.exists, "the report of the script")
    assert report.read_text() == "0 zombies"
    container.signal(signal.SIGTERM)
    assert container.wait() == 1, job.text()
    # It waits for a second node, where torch handles no signals: the kernel would drop them for process 1.
    meeting = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    container = job.launch([*python("-m", "fastckpt_run"), "--fast-events", str(events), *meeting, *run])
    job.until(events.exists, "the start of the agent")
    container.signal(signal.SIGTERM)
    assert container.wait() == 128 + signal.SIGTERM, job.text()
