"""Records of the rounds of one job in a store: joins, decisions, signs of life."""

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, TypeVar

from fastckpt._core.error_codes import coded
from fastckpt_run.rendezvous.job_terms import UNKNOWN
from fastckpt_run.rendezvous.membership import BEFORE_THE_FIRST, Master, Node, Round
from fastckpt_run.rendezvous.signing import Refused, Signer
from fastckpt_run.rendezvous.store_connection import StoreConnection, StoreLost

logger = logging.getLogger("fastckpt.launcher")

_GIVEN = b"given:"
_RING = b"1"
_PROTOCOL = "2"
"""Names the records. Agents of another one would end a round of others before these could compare it with them."""
_READ_ONCE = "nodes", "faults", "terms", "drained"
"""Fields that stay the same for as long as a round lasts, in a record of their own."""
T = TypeVar("T")


class RoundStore:
    """The records of a job, as one agent sees them. All calls raise StoreLost.

    Keys of a round that nodes are joining carry the name of the round before it, which is random. So records of two
    halves of a job, of another round or of an earlier launch have other keys. Each agent waits for its *bell*, a key
    that others set when there is something to read for it.

    Attributes:
        connection: The connection for all calls but the wait for the bell.
        secret: The secret of the job: the given one, or the store's.
        closed: The last round, once this agent has read that no other follows; None before.
    """

    def __init__(
        self, connection: StoreConnection, job: str, given: bytes | None, id: str, offer: bytes | None = None
    ) -> None:
        """Open the records of a job.

        Args:
            connection: The store.
            job: The name of the job.
            given: The secret that the user gave, if any.
            id: The agent.
            offer: Without such a secret, the one to hand out if the store has none.
        """
        self.connection = connection
        self._id, self._name, self._given = id, job, given
        self._job = f"fastckpt/{job}"
        self._disagrees = False
        self.secret = self._agree(given, offer or secrets.token_hex(32).encode())
        self._signer = Signer(self.secret)
        self._prefix = f"{self._job}/{_PROTOCOL}/{self._signer.fingerprint}"
        self._refused = set[str]()
        self._seen = set[str]()
        self._bell: StoreConnection | None = None
        self._has_left = False
        self.closed: Round | None = None
        self._read_last = BEFORE_THE_FIRST
        self._announced: tuple[str, Mapping[str, Any]] = ("", {})

    def at(self, connection: StoreConnection) -> "RoundStore":
        """The records of the same job, for the same agent, in another store."""
        found = RoundStore(connection, self._name, self._given, self._id, self.secret)
        found._announced = self._announced
        return found

    def rounds_at(self, connection: StoreConnection) -> int:
        """The number of rounds that the job has had in another store."""
        return self.at(connection).last_round().number

    @property
    def place(self) -> str:
        """Address of the store."""
        return f"{self.connection.host}:{self.connection.port}"

    # --- the last round

    def last_round(self) -> Round:
        """The last round that was completed."""
        return self._last()[1]

    def complete(self, before: Round, now: Round) -> bool:
        """Make ``now`` the last round; False if it is not ``before`` any more."""
        found, last = self._last()
        if last.name != before.name or last.is_closed:
            return False
        if now.nodes:
            record = now.to_record()
            self._put({name: record[name] for name in _READ_ONCE}, now.name, "nodes")
            self._read_last = now
        if not before.number:
            _close_to_the_first_protocol(self.connection, self._job, self._signer)
        summary = self._summary(now)
        return self.connection.replace(self._key("last"), found, summary) == summary

    def carry_over(self, mine: Round) -> Round:
        """Bring the last round that this agent knows to a store that has none, or an older one; returns the last."""
        while (last := self.last_round()).number < mine.number and not last.is_closed:
            self.complete(last, mine)
        if self._announced[0] == mine.name == last.name:
            self._put(dict(self._announced[1]), mine.name, "first")
        return last

    # --- the next round

    def join(self, last: Round, node: Node) -> int:
        """Take a place in the round that follows; returns its number."""
        slot = self.connection.add(self._key(last.name, "slots"), 1) - 1
        self._put(node.to_record(), last.name, "slot", slot)
        return slot

    def slots(self, last: Round) -> int:
        """Return the number of places that have been taken."""
        return self.connection.add(self._key(last.name, "slots"), 0)

    def joined(self, last: Round, slot: int) -> Node | None:
        """The node that has taken a place; None if its record is not there, or refused."""
        return self._read(Node.from_record, last.name, "slot", slot)

    def all_joined(self, last: Round, slots: Sequence[int]) -> list[Node | None]:
        """The nodes that have taken some places, in two messages if all their records are there; as `joined`."""
        keys = [self._key(last.name, "slot", slot) for slot in slots]
        if not self.connection.has_all(keys):
            return [self.joined(last, slot) for slot in slots]
        records = zip(keys, self.connection.get_all(keys), strict=True)
        return [self._opened(key, record, Node.from_record) for key, record in records]

    def announce(self, round: Round, master: Master) -> None:
        """Announce where a round meets."""
        self._put(asdict(master), round.name, "master")
        self.ring(node.id for node in round.nodes if node.id != self._id)

    def master(self, round: Round) -> Master | None:
        """The place where a round meets; None if it is not known yet."""
        return self._read(Master.from_record, round.name, "master")

    def announce_first(self, name: str, first: Mapping[str, Any]) -> None:
        """Announce the first agent of the round of that name to nodes that wait for a place or come later.

        That is where it serves others, as ``address``, and the checkpoint directories, as ``directories``.
        """
        if self._announced != (name, first):
            self._put(dict(first), name, "first")
            self._announced = name, first

    def first(self, round: Round) -> dict[str, Any]:
        """Return the announcement of a round's first agent; empty if it has announced nothing."""
        return self._read(dict, round.name, "first") or {}

    def waiting(self, last: Round) -> list[Node]:
        """The nodes that have taken a place in the round that follows, and have none in the last one."""
        came = self.all_joined(last, range(self.slots(last)))
        return list({node.id: node for node in came if node and node.id not in last.ranks}.values())

    def missing(self, last: Round) -> list[Node]:
        """The nodes of the last round that have not come to the one that follows, and are not reported gone."""
        came = {node.id for node in self.all_joined(last, range(self.slots(last))) if node} | self.gone(last).keys()
        return [node for node in last.nodes if node.id not in came]

    def drain(self, last: Round, host: str, *, undo: bool = False, other: str = "") -> None:
        """Have the rounds that follow leave out a host, while there is the ``other``, if named; or take it back in."""
        self._append({"host": host, "undo": undo, "other": other}, last.name, "drain")

    def drained(self, last: Round) -> dict[str, str]:
        """The hosts that the round that follows leaves out; as `Round.drained`."""
        found = dict(last.drained)
        for record in self._appended(last.name, "drain"):
            found.pop(host := str(record.get("host")), None)
            found |= {} if record.get("undo") else {host: str(record.get("other", ""))}
        return found

    def report_apart(self, round: Round, id: str, *, undo: bool = False) -> None:
        """Report that nothing comes from an agent of a round, which answers others; or that messages come again."""
        self._append({"by": self._id, "id": id, "undo": undo}, round.name, "apart")

    def apart(self, round: Round) -> set[tuple[str, str]]:
        """The agents of a round, by their ids, that receive nothing from another one."""
        found = set[tuple[str, str]]()
        for record in self._appended(round.name, "apart"):
            pair = str(record.get("by")), str(record.get("id"))
            found.discard(pair) if record.get("undo") else found.add(pair)
        return found

    # --- the end of rounds

    def end(self, round: Round) -> None:
        """End a round: its nodes shall come to the next one."""
        key = self._key(round.name, "end")
        record = self._signer.seal(key, {"by": self._id})
        found = self.connection.replace(key, None, record)
        if found != record and not self.is_ended(round):
            self.connection.set(key, record)  # a stranger was there before, and was refused
        elif found != record:
            return  # the first one has rung
        self.ring(node.id for node in round.nodes if node.id != self._id)

    def is_ended(self, round: Round) -> bool:
        """Return whether a round was ended."""
        return self._read(bool, round.name, "end") is not None

    def close(self, ending: str) -> None:
        """End the job: no round follows. The first agent that ends it gives the reason."""
        while True:
            record, last = self._last()
            closed = self._summary(replace(last, is_closed=True, ending=ending))
            if last.is_closed or self.connection.replace(self._key("last"), record, closed) == closed:
                break
        waiting = [self.joined(last, slot) for slot in range(self.slots(last))]
        self.ring({node.id for node in (*last.nodes, *waiting) if node and node.id != self._id})

    def is_end_known(self) -> bool:
        """Return whether all agents of an ended job have read so: those of the last round, and those that wait."""
        last = self.last_round()
        there = {node.id for node in (*last.nodes, *self.waiting(last))} - self.gone(last).keys()
        return self.connection.has_all([self._key("end", id) for id in there])

    def report_gone(self, round: Round, ids: Iterable[str], *, in_good_order: bool = False) -> None:
        """Report nodes of a round that are gone for certain; their hosts have failed unless they left in good order."""
        for id in ids:
            self._append({"gone": id, "left": in_good_order}, round.name, "gone")

    def gone(self, round: Round) -> dict[str, bool]:
        """The nodes of a round that were reported gone, by their ids; true for those that left in good order."""
        found = dict[str, bool]()
        for record in self._appended(round.name, "gone"):
            id = str(record.get("gone"))
            found[id] = bool(record.get("left")) or found.get(id, False)
        return found

    def report(self, round: Round, what: str) -> None:
        """Count this agent among those of a round with the same finding: see `first_node`."""
        self.connection.add(self._key(round.name, what), 1)

    def reports(self, round: Round, what: str) -> int:
        """Return the number of nodes that have reported this."""
        return self.connection.add(self._key(round.name, what), 0)

    def hold(self) -> None:
        """Note that this agent's process holds the store."""
        self._put({"by": self._id}, "holder")

    def holder(self) -> str:
        """The id of the agent that holds the store; empty if it is not one of this job."""
        return self._read(lambda record: str(record["by"]), "holder") or ""

    def refer(self, to: Mapping[str, Any]) -> None:
        """Leave the place where others meet for nodes that wait in this store: see `referrals`."""
        self._put(dict(to), "referral")

    def referral(self) -> dict[str, Any]:
        """Return the referral that was left; empty if there is none."""
        return self._read(dict, "referral") or {}

    # --- signs of life

    def beat(self, number: int) -> None:
        """Give a sign of life."""
        self._put({"beat": number}, "beat", self._id)

    def beats(self, ids: Iterable[str]) -> dict[str, int]:
        """The newest sign of life of each node; nodes that have given none here are left out."""
        found = dict[str, int]()
        keys = {id: self._key("beat", id) for id in ids}
        # The first of a round looks for all others at once: one message for all of them, unless one has given none.
        fresh = keys.keys() - self._seen
        if len(fresh) > 1 and self.connection.has_all([keys[id] for id in fresh]):
            self._seen |= fresh
        values = {id: self.connection.peek(keys[id]) for id in keys.keys() - self._seen}
        self._seen |= {id for id, value in values.items() if value is not None}
        seen = [id for id in keys if id in self._seen and id not in values]
        values |= dict(zip(seen, self.connection.get_all([keys[id] for id in seen]), strict=True))
        for id, value in values.items():
            try:
                found |= {id: int(self._signer.open(keys[id], value)["beat"])} if value is not None else {}
            except (Refused, KeyError, ValueError, TypeError) as error:
                self._refuse(keys[id], error)
        return found

    # --- bells

    def ring(self, ids: Iterable[str]) -> None:
        """Wake agents."""
        self.connection.set_all([self._key("bell", id) for id in ids], _RING)

    def listen(self, rung: Callable[[], None]) -> None:
        """Call ``rung`` in a thread of its own, each time that the bell rings, until the store is closed or lost."""
        if self._disagrees:
            logger.error(
                coded(
                    "the agents of this job at %s:%d use %s: give one to all (--fast-secret-file, FASTCKPT_SECRET)",
                    "FC-035",
                ),
                self.connection.host,
                self.connection.port,
                "another secret, or none" if self._given else "a secret, and this one has none",
            )
        self._bell = StoreConnection(self.connection.host, self.connection.port, self.connection.calls)
        threading.Thread(target=self._listen, args=(self._bell, rung), name="fastckpt-bell", daemon=True).start()

    def _listen(self, bell: StoreConnection, rung: Callable[[], None]) -> None:
        key = self._key("bell", self._id)
        with suppress(StoreLost):
            while not self._has_left:
                bell.wait(key)
                # Deleted before anybody reads the news: a later ring sets it again.
                bell.delete(key)
                rung()
        rung()

    def leave(self) -> None:
        """Close the connections."""
        self._has_left = True
        with suppress(StoreLost):
            self.ring([self._id])  # so that the thread which listens comes back, and no call is left behind
        for connection in (self._bell, self.connection):
            if connection is not None:
                connection.close()

    # --- records

    def _agree(self, given: bytes | None, drawn: bytes) -> bytes:
        key = f"{self._job}/secret"
        offer = _GIVEN + Signer(given).fingerprint.encode() if given else drawn
        found = self.connection.replace(key, None, offer)
        if given is None and not found.startswith(_GIVEN):
            return found
        self._disagrees = found != offer
        return given or drawn

    def _key(self, *parts: object) -> str:
        return "/".join((self._prefix, *map(str, parts)))

    def _put(self, body: dict[str, Any], *parts: object) -> None:
        key = self._key(*parts)
        self.connection.set(key, self._signer.seal(key, body))

    def _append(self, body: dict[str, Any], *parts: object) -> None:
        key = self._key(*parts)
        self.connection.append(key, self._signer.seal(key, body) + b"\n")

    def _appended(self, *parts: object) -> Iterator[dict[str, Any]]:
        key = self._key(*parts)
        for line in (self.connection.peek(key) or b"").splitlines():
            try:
                yield self._signer.open(key, line)
            except Refused as error:
                self._refuse(key, error)

    def _read(self, read: Callable[[dict[str, Any]], T], *parts: object) -> T | None:
        key = self._key(*parts)
        record = self.connection.peek(key)
        return None if record is None else self._opened(key, record, read)

    def _opened(self, key: str, record: bytes, read: Callable[[dict[str, Any]], T]) -> T | None:
        try:
            return read(self._signer.open(key, record))
        except (Refused, ValueError, KeyError, TypeError) as error:
            self._refuse(key, error)
            return None

    def _last(self) -> tuple[bytes | None, Round]:
        key = self._key("last")
        record = self.connection.peek(key)
        if record is None:
            return None, BEFORE_THE_FIRST
        try:
            last = Round.from_record(self._signer.open(key, record) | {"nodes": []})
            whole = self._with_nodes(last)
            if last.is_closed and self.closed is None:
                self.closed = whole
                with suppress(StoreLost):  # the holder of the store may leave as soon as all have noted that
                    self._put({}, "end", self._id)
            return record, whole
        except (Refused, ValueError) as error:
            self._refuse(key, error)
            self.connection.delete(key)  # it is nobody's: an agent with another secret uses other keys
            return None, BEFORE_THE_FIRST

    def _summary(self, round: Round) -> bytes:
        """The record of the last round. Its nodes have one of their own: agents read them once, and this often."""
        bare = replace(round, nodes=(), faults={}, terms=UNKNOWN, drained={})
        return self._signer.seal(self._key("last"), bare.to_record())

    def _with_nodes(self, round: Round) -> Round:
        """A round of which the summary was read; raises ValueError if its nodes are not there, or refused."""
        if not round.number:
            return round
        known = self._read_last  # several threads read
        if known.name != round.name:
            read = self._read(lambda record: Round.from_record({**round.to_record(), **record}), round.name, "nodes")
            if read is None:
                raise ValueError("its nodes are not there")
            self._read_last = known = read
        return replace(known, is_closed=round.is_closed, ending=round.ending)

    def _refuse(self, key: str, why: Exception) -> None:
        text = f"the record {key.removeprefix(self._job)} in the store of the rendezvous was refused: {why}"
        if text not in self._refused and len(self._refused) < 100:
            self._refused.add(text)
            logger.warning("%s", text)


def _close_to_the_first_protocol(connection: StoreConnection, job: str, signer: Signer) -> None:
    """Have agents of versions before terms find that the job is over, unless one of theirs runs in this store."""
    key = f"{job}/{signer.fingerprint}/last"
    connection.replace(key, None, signer.seal(key, replace(BEFORE_THE_FIRST, is_closed=True).to_record()))
