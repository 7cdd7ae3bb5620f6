"""Nodes whose names lead them to nobody, so that they wait in stores of their own: others refer them to the job's."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from fastckpt._core.memory.processes import Process
from fastckpt_run.rendezvous import handler as handler_module
from fastckpt_run.rendezvous import referrals
from fastckpt_run.rendezvous.handler import FastckptRendezvousHandler
from fastckpt_run.rendezvous.round_store import RoundStore
from tests.support.ports import free_port
from tests.unit.fastckpt_run.rendezvous.agents import Agents, agents, join, meet, places, ranks, until

HOSTS = ("127.0.0.1", "127.0.0.2")
SECRET, OTHER = b"0123456789abcdef", b"fedcba9876543210"
STALE = "127.0.0.3"
"""Address to which names lead that are out of date."""


@pytest.fixture(autouse=True)
def often(monkeypatch) -> None:
    monkeypatch.setattr(referrals, "LOOK", 0.2)
    monkeypatch.setattr(handler_module, "_LOOK_ELSEWHERE", 0.2)


@pytest.fixture
def seldom(often, monkeypatch) -> None:
    """Looks are those of the test alone."""
    monkeypatch.setattr(referrals, "LOOK", 600.0)


class TwoStores:
    """Nodes of a job on two hosts, each of which holds a store."""

    def __init__(self, job: Agents) -> None:
        self._job, self._ports = job, [free_port(), free_port()]

    def on(self, number: int, *, sees_other: bool = True, **kind: object) -> FastckptRendezvousHandler:
        """A node on one of the hosts, which may know a stale address of the other one."""
        places = [self.place(0), self.place(1)]
        if not sees_other:
            places[1 - number] = STALE, free_port()  # a store listens at all addresses
        self._job.endpoint = ",".join(f"{name}:{port}" for name, port in places)
        return self._job.new(here=HOSTS[number], **kind)

    def place(self, number: int) -> tuple[str, int]:
        return HOSTS[number], self._ports[number]


def test_a_newcomer_whose_names_are_stale_joins_the_running_job(caplog):
    with agents(2, 3) as job:
        hosts = TwoStores(job)
        nodes = [hosts.on(1), hosts.on(1)]
        meet(nodes)
        newcomer = hosts.on(0, sees_other=False)
        assert newcomer._endpoints.server is not None
        join(newcomer, nodes)
        assert newcomer._endpoints.server is None
        # Later rounds find it where it is now.
        assert {info.world_size for info in meet([*nodes, newcomer])} == {3}
    said = [line for line in caplog.messages if "reaches nobody of its job by" in line]
    assert len(said) == 1 and f"by {STALE}: the others meet on host {nodes[0]._me.host}, at 127.0.0.1:" in said[0]


def test_nodes_of_a_first_round_meet_where_the_first_of_the_list_is_though_the_other_one_does_not_reach_it():
    with agents(2, 2) as job:
        hosts = TwoStores(job)
        nodes = [hosts.on(0), hosts.on(1, sees_other=False)]
        assert [info.world_size for info in meet(nodes)] == [2, 2]
        assert [node._endpoints.server is None for node in nodes] == [False, True]


@pytest.mark.usefixtures("seldom")
def test_only_the_store_with_fewer_rounds_is_referred_and_of_two_alike_the_later_one():
    with agents(1, 1) as job:
        hosts = TwoStores(job)
        nodes = [hosts.on(0, sees_other=False), hosts.on(1, sees_other=False)]
        for node in nodes:  # two halves of one job, whose links are good again
            node._endpoints._list = [hosts.place(0), hosts.place(1)]

        def referred() -> list[bool]:
            for node in nodes:
                node._referrals._look()
            return [bool(node._records.referral()) for node in nodes]

        meet(nodes[1:])
        assert referred() == [True, False]
        assert nodes[0]._records.referral()["port"] == hosts.place(1)[1]
        nodes[0]._records.connection.delete(nodes[0]._records._key("referral"))
        meet(nodes[:1])
        assert referred() == [False, True]
        # The half that has more rounds by now does not go where it was referred to before.
        meet(nodes[1:])
        nodes[1]._next_look = 0.0
        nodes[1]._give_way()
        assert nodes[1]._endpoints.server is not None


@pytest.mark.usefixtures("seldom")
@pytest.mark.parametrize(
    "of_other",
    [{"job": "another", "secret": SECRET}, {"secret": OTHER}, {"secret": SECRET}],
    ids=["job", "secret", "closed"],
)
def test_no_store_of_another_job_or_secret_is_referred_and_none_to_a_job_that_has_ended(of_other):
    with agents(1, 1) as job:
        hosts = TwoStores(job)
        other = hosts.on(1, sees_other=False, **of_other)
        node = hosts.on(0, sees_other=False, secret=SECRET)
        node._endpoints._list = [hosts.place(0), hosts.place(1)]
        meet([node])
        if of_other == {"secret": SECRET}:
            node.set_closed()
        node._referrals._look()
        job.endpoint = "{}:{}".format(*hosts.place(1))
        assert not [key for key in job.stranger().list_keys() if "referral" in key]
        assert not other._records.referral()


def _unsigned(records: RoundStore) -> None:
    records.connection.set(records._key("referral"), b'1 0 {"host":"h","address":"127.0.0.1","port":1}')


def _to(**place: object) -> Callable[[RoundStore], None]:
    return lambda records: records.refer({"host": "h", "address": "127.0.0.1", "port": 1, **place})


@pytest.mark.usefixtures("seldom")
def test_a_referral_without_signature_or_sense_is_passed_over():
    with agents(1, 1) as job:
        node = TwoStores(job).on(1, sees_other=False)
        for leave in (_unsigned, _to(address="name.of.a.host"), _to(port=0), _to(port="1"), _to(address=None)):
            leave(node._records)
            node._next_look = 0.0
            node._give_way()
            assert node._endpoints.server is not None and node._endpoints._referred is None


@pytest.mark.parametrize("parts", [True, False])
def test_a_node_that_looks_for_an_agent_leaves_its_own_store_and_joins_the_round_of_that_one(parts):
    """Before it looks, or when it has found it."""
    sought = replace(Process.current(), pid=1)
    with agents(1, 2, endpoint=places(2)) as job:
        node = job.new()
        assert node._endpoints.server is not None and len(meet([node])) == 1
        meet([node])  # it has had more rounds than the others, which count for nothing
        assert not node.reach(sought, parts=parts), "nobody is there"
        assert (node._endpoints.server is None) == parts
        job.endpoint = job.endpoint.split(",")[1]
        other = job.new()
        other._me = other._me._replace(process=sought.to_record())
        meet([other])
        until(lambda: node.reach(sought, parts=parts), "it reaches the agent")
        assert node._endpoints.server is None
        join(node, [other])
        assert ranks([other, node]) == [0, 1]
