"""Node checks on hosts: a link that carries messages but no data, a slowed processor, an agent that is killed."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.job import DEADLINE

pytestmark = pytest.mark.campaign
CHECKED = ("--fast-node-check",)
SLOW_LINK = "tc qdisc add dev eth0 root tbf rate 512kbit burst 8kb latency 500ms"
"""Messages of the rendezvous pass; a MiB takes longer than an exchange may."""
CPU = Path("/sys/fs/cgroup/cpu")


def test_a_host_whose_link_carries_no_data_leaves_and_the_others_train(fleet: Fleet) -> None:
    job = fleet.job((0, 1, 2), nodes="2:3", flags=CHECKED)
    for number in (0, 1, 2):
        job.launch(number, flags=(f"--fast-events={job.out}/events.{number}",))
    job.cluster.hosts[2].run(*SLOW_LINK.split())
    assert job.agents.pop(2).wait(DEADLINE) == 76, job.text()
    # Its signs of life take the same link: the others may lose it before it is judged.
    assert "node2 failed the node check, and takes no part in the job: problem: pair: " in job.output(2)
    assert "Traceback" not in job.output(2)
    job.finish()
    rounds = [event for event in job.reported(0, "node_check") if event["occasion"] == "round"]
    assert rounds and rounds[-1]["verdict"] == "ok"


def test_a_job_that_is_too_small_without_a_bad_host_says_which_one_that_was(fleet: Fleet) -> None:
    job = fleet.job((0, 1, 2), flags=(*CHECKED, "--rdzv-conf=join_timeout=25"))
    job.cluster.hosts[1].run(*SLOW_LINK.split())
    job.launch(0, 1, 2)
    codes = {number: agent.wait(DEADLINE) for number, agent in job.agents.items()}
    assert codes[1] == 76 and codes[0] and codes[2], job.text()
    said = [line for number in (0, 2) for line in job.output(number).splitlines() if "error: " in line]
    assert any("Of the last round, node1 " in line for line in said), said


@pytest.fixture
def slowed() -> Iterator[Path]:
    """A control group that gets a fifth of a processor."""
    group = CPU / f"fastckpt-check-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("20000")
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    yield group
    end = time.monotonic() + 10
    while group.exists():
        with suppress(OSError):
            group.rmdir()
        assert not group.exists() or time.monotonic() < end, "processes of the hosts are left"
        time.sleep(0.05)


def test_a_slowed_host_of_two_is_named_and_takes_part(slowed: Path, fleet: Fleet) -> None:
    job = fleet.job((0, 1), flags=CHECKED)
    groups = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next(path for _, controllers, path in groups if "cpu" in controllers.split(","))
    (slowed / "cgroup.procs").write_text(str(os.getpid()))  # what is started from there stays there
    job.launch(1)
    (CPU / own.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
    job.launch(0)
    job.until(lambda: "slow nodes, which stay in the job: node1 (node 1)" in job.output(0), "a slow host")
    (slowed / "cpu.cfs_quota_us").write_text("-1")
    job.finish()


@pytest.mark.parametrize("delay", [1.0, 2.0, 3.0, 4.0, 5.0])
def test_a_host_that_is_killed_during_its_checks_is_replaced_and_leaves_nothing(fleet: Fleet, delay: float) -> None:
    job = fleet.job((0, 1), flags=CHECKED)
    job.launch(0, 1)
    time.sleep(delay)
    os.kill(job.agent_pid(1), signal.SIGKILL)
    assert job.agents.pop(1).wait(DEADLINE) != 0
    end = time.monotonic() + 10
    while "fastckpt_run" in job.cluster.hosts[1].run("ps", "-e", "-o", "args="):
        assert time.monotonic() < end, "a process of the agent is left"
        time.sleep(0.1)
    job.launch(1)
    job.finish()
