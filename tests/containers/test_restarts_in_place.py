"""A container is killed, and another one takes its place: the memory of the pod is there, the processes are others."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import yaml

from tests.containers.conftest import ContainerJob
from tests.containers.containers import Container, python
from tests.containers.orphans import ORPHANS
from tests.faults.faults import stop
from tests.faults.jobs import HERE, Job, assert_as_if_nothing_had_happened

ROOT = Path(__file__).parents[2]
NEVER = ("--disk", "1000")
pytestmark = pytest.mark.campaign


def occupy_numbers(job: ContainerJob) -> None:
    """Start containers that do nothing: the next one gets another number for its pid namespace than the last."""
    for _ in range(3):
        job.pod.start("sleep", "1000", output=job.output, environment=os.environ)


def wait_for_text(job: ContainerJob, text: str) -> None:
    job.until(lambda: text in job.text(), text)


def test_a_job_survives_its_containers_one_killed_amid_a_save_one_amid_a_persist_and_one_that_was_not_gone(
    job: ContainerJob, uninterrupted
) -> None:
    reference = uninterrupted()
    job.with_faults(stop(0, "snapshot.fill", 18))
    (job.folder / "faults").write_text("\n".join(map(repr, job.faults)))
    # 1. killed amid a save: rank 0 stands still in its copy, and storage has what is older
    first = job.begin()
    job.until(lambda: job.injected() == 1, "the copy")
    job.until(lambda: job.stored() == [10], "step 10 on storage")
    first.kill()
    occupy_numbers(job)
    # 2. another host name, and amid a persist: 40 MB at 1 MB/s
    slow = python("-m", "fastckpt_run", "--fast-persist-mbps", "1")
    second = job.begin("--ballast", "40", "--stop-at", "22", launcher=slow, name="train-1")
    job.wait_for("saved", 22)
    # 3. the next container begins while that one still runs, and waits
    job.begin(name="train-1")
    wait_for_text(job, "of another pid namespace on train-1")
    assert "it saves to" in job.text() and len(job.starts()) == 2, "it has no workers until the memory is free"
    second.kill()
    assert job.stored() == [10], "the persist of step 20 was under way"
    assert job.wait() == 0, job.text()
    assert job.tiers() == [(16, "memory"), (22, "memory")]
    assert_as_if_nothing_had_happened(job, reference)
    assert "killed processes" not in job.text() and not job.held()


@pytest.mark.parametrize("seed", range(5))
def test_a_job_survives_containers_that_are_killed_at_random_instants(
    job: ContainerJob, uninterrupted, seed: int
) -> None:
    reference, chance = uninterrupted("--steps", "400"), random.Random(seed)
    for number in range(8):
        container = job.begin("--steps", "400", name=f"train-{number % 2}")
        job.until(lambda: len(job.starts()) == job.launches, "the first step")
        time.sleep(chance.uniform(0, 0.4))
        container.kill()
        if number % 3:
            occupy_numbers(job)
    job.begin("--steps", "400")
    assert job.wait() == 0, job.text()
    assert_as_if_nothing_had_happened(job, reference)
    assert "has not renewed its record" not in job.text() and not job.held()
    print(f"seed {seed}: {job.tiers()}")


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


def run_orphans(job: ContainerJob, *launcher: str) -> Container:
    report = job.folder / "report"
    script = str(Path(__file__).parent / "orphans.py")
    command = [*launcher, *python("-m", "fastckpt_run", "--standalone", "--fast-no-preload", script, str(report))]
    environment = os.environ | {"FASTCKPT_SHM_DIR": "/dev/shm", "TMPDIR": str(job.folder)}
    container = job.pod.start(*command, output=job.output, environment=environment)
    job.process = container.process
    job.until(report.exists, "the report of the script")
    assert report.read_text().startswith("0 zombies"), f"of {ORPHANS}"
    return container


def test_a_container_reaps_orphans_and_ends_by_a_signal_before_it_has_workers(job: ContainerJob) -> None:
    container = run_orphans(job)
    container.signal(signal.SIGTERM)
    assert container.wait() == 1, job.text()
    events = job.folder / "waiting-events"
    # It waits for a second node, where torch handles no signals: the kernel would drop them for process 1.
    waiting = python("-m", "fastckpt_run", "--fast-events", str(events), "--nnodes", "2", "--rdzv-backend", "c10d")
    command = (*waiting, "--rdzv-endpoint", "localhost:0", str(Path(__file__).parent / "orphans.py"))
    environment = os.environ | {"FASTCKPT_SHM_DIR": "/dev/shm", "TMPDIR": str(job.folder)}
    container = job.pod.start(*command, output=job.output, environment=environment)
    job.process = container.process
    job.until(events.exists, "the start of the agent")
    container.signal(signal.SIGTERM)
    assert container.wait() == 128 + signal.SIGTERM, job.text()
