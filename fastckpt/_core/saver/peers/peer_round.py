"""The agents of one round, and the partners among them that keep copies of this one's files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

KEEPERS = 2
"""Other hosts that keep a node's small files."""


@dataclass(frozen=True)
class Peer:
    """An agent of this round.

    Attributes:
        id: Unique id of the agent process.
        memory: Id of its memory; agents that share it lose their memory together.
        address: Address at which it serves files, HOST:PORT.
        launch: Its name in histories.
        host: Its host's name, for people to read.
        marks: The marks of the checkpoint directories in which it has saved before this round, by directory.
    """

    id: str
    memory: str
    address: str
    launch: str = ""
    host: str = ""
    marks: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class PeerRound:
    """The agents of one round, in the order of group ranks, and the secret that they share.

    Attributes:
        own: The rank of this agent.
        partners: The agents that keep copies of large files of this one.
        parity: True if the partners are the others of a group of which each keeps parity, instead of copies.
    """

    peers: Sequence[Peer]
    own: int
    secret: bytes
    partners: Sequence[Peer] = ()
    parity: bool = False

    @property
    def launches(self) -> list[str]:
        """The names by which histories know these agents, that of the first one first."""
        return [peer.launch for peer in self.peers]

    @property
    def group(self) -> tuple[str, ...]:
        """The ids of this agent and its partners, in order."""
        return tuple(sorted({self.peers[self.own].id, *(peer.id for peer in self.partners)}))

    @property
    def keepers(self) -> list[Peer]:
        """The agents that keep small files of this one: its partners, and the next ones that have another memory."""
        count = len(self.peers)
        following = [self.peers[(self.own + offset) % count] for offset in range(1, count)]
        found = {peer.memory: peer for peer in reversed(following) if peer.memory != self.peers[self.own].memory}
        nearest = [peer for peer in following if found.get(peer.memory) is peer][:KEEPERS]
        return [*self.partners, *(peer for peer in nearest if peer not in self.partners)]
