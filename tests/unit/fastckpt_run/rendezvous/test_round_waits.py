"""Waits of the agents of a round for each other."""

from datetime import timedelta

import pytest

from fastckpt_run.rendezvous.round_waits import RoundEnded
from tests.unit.fastckpt_run.rendezvous.agents import agents, kill, meet, ranks


def test_a_wait_for_an_agent_that_dies_ends_with_the_round_and_one_for_what_is_there_does_not():
    with agents(2, 2) as job:
        nodes = job.several(2)
        infos = meet(nodes)
        first, last = sorted(range(2), key=lambda each: ranks(nodes)[each])
        infos[last].store.set("written", b"1")
        kill(nodes[last])
        with pytest.raises(RoundEnded):
            infos[first].store.get("never written")
        assert nodes[first].ends_soon(0.0)
        assert infos[first].store.multi_get(["written"]) == [b"1"]


def test_a_wait_in_a_round_that_goes_on_ends_at_its_timeout():
    with agents(1, 1) as job:
        (info,) = meet(job.several(1))
        with pytest.raises(RuntimeError, match="wait timeout"):
            info.store.wait(["never written"], timedelta(milliseconds=50))
        assert not job.handlers[0].ends_soon(0.0)
