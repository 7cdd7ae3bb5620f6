"""Node checks on hosts: a link that carries messages but no data."""

import pytest

from tests.nodes.conftest import Fleet
from tests.nodes.job import DEADLINE

pytestmark = pytest.mark.campaign
CHECKED = ("--fast-node-check",)
SLOW_LINK = "tc qdisc add dev eth0 root tbf rate 512kbit burst 8kb latency 500ms"
"""Messages of the rendezvous pass; a MiB takes longer than an exchange may."""


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
