"""Nodes that have met in two stores, since they did not reach each other: how one comes to the others."""

from dataclasses import replace

import pytest

from fastckpt._core.memory.processes import Process
from tests.support.ports import free_port
from tests.unit.fastckpt_run.rendezvous.agents import PATIENCE, agents, in_thread, meet, until


@pytest.mark.parametrize("parts", [True, False])
def test_a_node_that_looks_for_an_agent_leaves_its_own_store_and_joins_the_round_of_that_one(parts):
    """Before it looks, or when it has found it."""
    own, others = (f"127.0.0.1:{free_port()}" for _ in range(2))
    sought = replace(Process.current(), pid=1)
    with agents(1, 2) as job:
        job.endpoint = f"{own},{others}"
        node = job.new()
        assert node._endpoints.server is not None and len(meet([node])) == 1
        meet([node])  # it has had more rounds than the others, which count for nothing
        assert not node.reach(sought, parts=parts), "nobody is there"
        assert (node._endpoints.server is None) == parts
        job.endpoint = others
        other = job.new()
        other._me = other._me._replace(process=sought.to_record())
        meet([other])
        until(lambda: node.reach(sought, parts=parts), "it reaches the agent")
        assert node._endpoints.server is None
        joining = in_thread(node.next_rendezvous)
        until(other.num_nodes_waiting, "the other one sees that it has come")
        infos = [in_thread(other.next_rendezvous).result(PATIENCE), joining.result(PATIENCE)]
        assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]
