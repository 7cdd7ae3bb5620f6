"""Questions among agents, over the real servers of savers."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastckpt._core.config import Settings
from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
from fastckpt._core.saver.server import Saver
from fastckpt.errors import FastckptError
from fastckpt_run.watch.node_channel import NodeChannel

SECRET = b"s" * 64


class Agents:
    """The savers of agents that are in one round, with a channel each; none owns memory."""

    def __init__(self, count, stack):
        self.savers = [Saver(Settings()) for _ in range(count)]
        for saver in self.savers:
            saver.start()
            stack.callback(saver.close)
        self.channels = [NodeChannel(saver) for saver in self.savers]
        for rank, channel in enumerate(self.channels):
            channel.answer("name", lambda sender, body, rank=rank: {"of": rank, "to": sender, **body})
            stack.callback(channel.close)
        self.peers = [
            Peer(f"agent-{i}", "", f"127.0.0.1:{saver.serve_peers()}", "", f"host{i}")
            for i, saver in enumerate(self.savers)
        ]
        self.meet()

    def meet(self):
        for rank, (saver, channel) in enumerate(zip(self.savers, self.channels, strict=True)):
            round = PeerRound(self.peers, rank, SECRET)
            saver._peers.assume(round)
            channel.meet(round)


@pytest.fixture
def agents():
    with contextlib.ExitStack() as stack:
        yield Agents(3, stack)


def test_agents_ask_at_once_again_after_a_break_and_not_who_is_gone_or_of_no_round(agents):
    with ThreadPoolExecutor(8) as pool:
        asked = pool.map(lambda number: agents.channels[1].ask_first("name", {"n": number}, 10.0), range(8))
        assert [answer["n"] for answer in asked] == [*range(8)]
    last = agents.channels[2]
    assert last.ask_first("name", {}, 10.0)["of"] == 0
    last._first[1].close()
    with pytest.raises((OSError, FastckptError)):
        last.ask_first("name", {}, 10.0)
    assert last.ask_first("name", {}, 10.0)["of"] == 0
    with pytest.raises(FastckptError, match="nobody here answers questions about 'weather'"):
        agents.channels[1].ask(0, "weather", {}, 10.0)
    stranger = PeerRound([*agents.peers, Peer("stranger", "", "127.0.0.1:1")], 3, SECRET)
    agents.channels[2].meet(stranger)
    with pytest.raises(FastckptError, match="not in this round"):
        agents.channels[2].ask(0, "name", {}, 10.0)
    agents.meet()
    agents.savers[1]._peers.close()
    assert list(agents.channels[0].ask_all("name", {}, 10.0)) == [0, 2]
    with pytest.raises(OSError):
        agents.channels[0].ask(1, "name", {}, 10.0)
