"""Exchanges values among the ranks of a job, as messages over the store that formed the process group."""

import contextlib
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist

from fastckpt._core.client.job_store import TIMEOUT, JobRanks, forgetting_addresses, named
from fastckpt._core.client.mailbox import StoreMailbox
from fastckpt._core.io.read_errors import in_words
from fastckpt.errors import ConfigError, FastckptError

_COUNT = "count"
"""The key of the number of ranks that have left; the key of each number below it has the rank."""
_SENT = "sent"
"""The key of the number of values that all ranks have sent without waiting; below it is the last one of each rank."""

_LISTED = "listed"
"""The key of the last list of such values."""
_BELL = "bell"
"""Below this is the number of the round of that list, a key for ranks that wait for it."""
_ANSWER, _RAISED = "answer", "raised"

Answers = Callable[[], list[Any]]
Decide = Callable[[list[Any]], Any]


class PeerDeparted(FastckptError):
    """A rank has left an agreement and sends no more values."""


class PeerFailed(FastckptError):
    """Another rank has raised an error where this one agrees with it: names the rank and the error."""


@dataclass
class _Rounds:
    """Rounds of one agreement that this rank has begun.

    Attributes:
        sent: Rounds in which values are sent without waiting.
        decided: Rounds that one rank decides.
        sharing: Blocks of `Agreement.sharing_errors` in which this rank is.
        pieces: Of the last answer, on the rank that gave it.
    """

    sent: int = 0
    decided: int = 0
    sharing: int = 0
    pieces: int = 1


class Agreement:
    """A collective of all ranks over the store of the default process group: no tensors, no pickles.

    Each rank calls it, in the same order. Agreements of other names are independent of it: between sending a value in
    one and its answers, another may be used. The number of messages grows with the ranks, not with their square: one
    rank alone reads the values of all.
    """

    _all_rounds: ClassVar[defaultdict[tuple[str, int, str], _Rounds]] = defaultdict(_Rounds)

    def __init__(self, name: str, of: str = "", ranks: JobRanks | None = None) -> None:
        """Make an agreement; a rank that leaves the one named ``of``, if given, leaves this one, too.

        All ranks make it, and their first one together; raises torch's DistStoreError if a rank does not come.
        ``ranks`` are those of the default process group, if not given.
        """
        self._name, self._of, self._ranks = name, of or name, ranks or JobRanks.met()
        self._mailbox = self._ranks.part(name)
        self._left = _LeftRanks(self._ranks.part(f"{self._of}/left"))
        self._rank, self._world = self._ranks.rank, self._ranks.world
        self._rounds = self._all_rounds[self._ranks.name, self._rank, name]

    def send(self, value: Any) -> Answers:
        """Send this rank's value (JSON) without waiting; returns a function that waits for the values of all ranks.

        Call the function once, before the next `send`; its values are in the order of ranks. It raises torch's
        DistStoreError if a rank does not come, or PeerDeparted.
        """
        # The rank that sends last lists the values for all, so nobody waits for the first rank to read them. Values and
        # list may replace those of the round before: each sender has read the list of that round.
        forget, number = self._forgetting_addresses(), self._rounds.sent
        self._rounds.sent += 1
        self._mailbox.put(f"{_SENT}/{self._rank}", [number, value])
        own = self._list(number) if self._mailbox.add(_SENT) == self._all_sent(number) else None

        def answers() -> list[Any]:
            values = own or self._listed(number)
            if values is None:
                self._wait(f"{_BELL}/{number}", lambda: self._check_list(number))
                values = self._listed(number)
            assert values is not None
            forget()
            return values

        return answers

    def _all_sent(self, number: int) -> int:
        return (number + 1) * self._world

    def _list(self, number: int) -> list[Any]:
        """List the values that all ranks have sent, for all ranks."""
        values = [value for _, value in self._mailbox.read_all([f"{_SENT}/{rank}" for rank in range(self._world)])]
        self._mailbox.put(_LISTED, [number, values])
        # For ranks that wait: they do not for the list itself, which others look at, see `StoreMailbox.look`.
        self._mailbox.replace_word(f"{_BELL}/{number}", _LISTED)
        if number:  # a rank that sent a value in this round has read the list of the one before
            self._mailbox.remove(f"{_BELL}/{number - 1}", pieces=1)
        return values

    def _listed(self, number: int) -> list[Any] | None:
        """The list of a round, if it is there."""
        found = self._mailbox.look(_LISTED)
        return found.message[1] if found is not None and found.message[0] == number else None

    def _check_list(self, number: int) -> None:
        """Raise PeerDeparted if a rank has left before it sent its value of this round."""
        if not (gone := self._left.ranks()):
            return
        keys = {rank: f"{_SENT}/{rank}" for rank in gone}
        there = gone if self._mailbox.has(*keys.values()) else [r for r in gone if self._mailbox.has(keys[r])]
        last = dict(zip(there, self._mailbox.read_all([keys[rank] for rank in there]), strict=True))
        lacking = [rank for rank in gone if rank not in last or last[rank][0] < number]
        if self._mailbox.has(f"{_BELL}/{number}"):
            return
        if lacking:
            raise PeerDeparted(f"rank {lacking[0]} has closed")
        if self._mailbox.add(_SENT, 0) >= self._all_sent(number):
            self._list(number)  # the last to send was interrupted, and has left

    def decide(self, value: Any, decide: Decide, within: float = TIMEOUT.total_seconds()) -> Any:
        """Let the first rank decide from the values of all ranks, given in the order of the ranks; return its answer.

        Args:
            value: Of this rank (JSON).
            decide: Called on the first rank alone; returns JSON, or raises.
            within: Seconds that the other ranks may take to come.

        Raises:
            FastckptError: The error of ``decide``, on all ranks, by class and text; PeerDeparted if a rank has left;
                PeerFailed if one has failed, see `fail`.
            DistStoreError: A rank does not come.
        """
        forget, rank, number = self._forgetting_addresses(), self._rank, self._rounds.decided
        self._rounds.decided += 1
        answer = self._decided(value, decide, number, within) if rank == 0 else self._ask(value, number, within)
        forget()
        return answer

    def gather(self, value: Any, within: float = TIMEOUT.total_seconds()) -> list[Any]:
        """The values that all ranks send (JSON), in the order of ranks; raises as `decide`."""
        # Most ranks send the same, so that the answer, which all of them receive, does not grow with the ranks.
        runs = self.decide(value, _runs, within)
        return [value for count, value in runs for _ in range(count)]

    def fail(self, error: BaseException) -> None:
        """Have the other ranks raise `PeerFailed` where they agree next; this one waits for none of them.

        The error takes the place of this rank's next value, so that all ranks are in step afterwards.
        """
        number, why = self._rounds.decided, f"rank {self._rank}: {in_words(error)}"
        self._rounds.decided += 1
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store may be gone, as the others are then
            if self._rank == 0:
                self._rounds.pieces = self._mailbox.put(f"answer/{number}", {_RAISED: [_name(PeerFailed), why]})
            else:
                self._mailbox.put(f"value/{number}/{self._rank}", [None, why])

    @contextlib.contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Have all ranks raise if one of them raises within: the others `PeerFailed`, where they agree next.

        It ends with an agreement. No other rank waits for one that raised, and that one for no other: they may be in a
        collective of a framework, to which it does not come.
        """
        self._rounds.sharing += 1
        try:
            yield
            self.gather(None)
        except BaseException as error:
            # Once, by the outermost block, or the ranks would not be in step; of PeerFailed the others know.
            if self._rounds.sharing == 1 and not isinstance(error, PeerFailed):
                self.fail(error)
            raise
        finally:
            self._rounds.sharing -= 1

    def _decided(self, value: Any, decide: Decide, number: int, within: float) -> Any:
        """Give all ranks the answer, on the first one."""
        keys = {rank: f"value/{number}/{rank}" for rank in range(1, self._world)}
        answer: dict[str, Any] = {_RAISED: ["", "rank 0 has failed to decide; its log has the traceback"]}
        key, mailbox = f"answer/{number}", self._mailbox
        try:
            self._wait_for_values([*keys.values()], keys, within)
            sent = mailbox.read_all([*keys.values()])
            if failed := [why for _, *more in sent for why in more]:
                raise PeerFailed("; ".join(failed))
            values = [_as_sent(value), *(each for each, *_ in sent)]
            answer = {_ANSWER: _as_sent(decide(values))}
        except FastckptError as error:
            answer = {_RAISED: [_name(type(error)), str(error)]}
            raise
        finally:  # after any error here, others must not wait for it
            before, self._rounds.pieces = self._rounds.pieces, mailbox.put(key, answer)
        if number:  # a rank that sent a value in this round has read the answer of the one before
            mailbox.remove(f"answer/{number - 1}", before)
        return answer[_ANSWER]

    def _ask(self, value: Any, number: int, within: float) -> Any:
        """Receive the answer, on all other ranks."""
        keys = {rank: f"value/{number}/{rank}" for rank in range(self._world)}
        own, key = keys[self._rank], f"answer/{number}"
        pieces = self._mailbox.put(own, [value])
        self._wait_for_values([key], keys, within)
        answer = self._mailbox.read(key).message
        self._mailbox.remove(own, pieces)  # the first rank has read it
        if _RAISED in answer:
            raise _error(*answer[_RAISED])
        return answer[_ANSWER]

    def _wait_for_values(self, awaited: Sequence[str], keys: Mapping[int, str], within: float) -> None:
        """Return when the awaited messages are there: the values, under these keys of ranks, or the answer to them."""
        answer = "" if self._rank == 0 else awaited[0]
        try:
            self._mailbox.wait(awaited, time.monotonic() + within, lambda: self._check_values(keys, answer))
        except TimeoutError as error:
            late = [rank for rank, key in keys.items() if not self._mailbox.has(key)] or [0]
            raise dist.DistStoreError(f"{named(late)} did not come within {within:g} s") from error

    def _check_values(self, keys: Mapping[int, str], answer: str) -> None:
        """Raise PeerDeparted if a rank has left before it sent its value, unless there is an answer."""
        gone = {rank: keys[rank] for rank in self._left.ranks() if rank in keys}
        if not gone or self._mailbox.has(*gone.values()):
            return
        lacking = next((rank for rank, key in gone.items() if not self._mailbox.has(key)), None)
        # Once there is an answer, values are removed.
        if lacking is not None and not (answer and self._mailbox.has(answer)):
            raise PeerDeparted(f"rank {lacking} has closed")

    def _wait(self, key: str, check: Callable[[], None]) -> None:
        try:
            self._mailbox.wait([key], time.monotonic() + TIMEOUT.total_seconds(), check)
        except TimeoutError as error:
            raise dist.DistStoreError(f"{error} was not sent in {TIMEOUT.total_seconds():g} s") from error

    def _forgetting_addresses(self) -> Callable[[], None]:
        """Forgets addresses in the first round, in which all ranks have formed their groups."""
        is_first = self._rounds.sent == self._rounds.decided == 0
        return forgetting_addresses() if is_first else lambda: None

    def sibling(self, name: str) -> "Agreement":
        """Another agreement of the same ranks, which may be used while answers of this one are outstanding."""
        return Agreement(f"{self._name}/{name}", self._of, self._ranks)

    def leave(self) -> None:
        """Leave this agreement and its siblings: a rank that waits for this one gets `PeerDeparted`."""
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store may be gone, as the others are then
            self._left.add(self._rank)


class _LeftRanks:
    """Ranks that have left an agreement, in the order in which they did."""

    def __init__(self, mailbox: StoreMailbox) -> None:
        self._mailbox = mailbox
        self._known: list[int] = []

    def add(self, rank: int) -> None:
        """Add a rank."""
        self._mailbox.put(f"{self._mailbox.add(_COUNT)}", rank)

    def ranks(self) -> list[int]:
        """All of them; one question to the store as long as there are no more than at the last call."""
        count = int(self._mailbox.word(_COUNT) or 0)
        keys = [f"{number}" for number in range(len(self._known) + 1, count + 1)]
        if keys and self._mailbox.has(*keys):  # a rank that has not sent its number yet is found at the next call
            self._known += self._mailbox.read_all(keys)
        return self._known


class SingleRank(Agreement):
    """The agreement of a job of one rank, without a process group."""

    def __init__(self) -> None:
        """Make an agreement that needs no store."""
        self._rounds = _Rounds()

    def send(self, value: Any) -> Answers:
        """The value of the one rank, as the others would receive it."""
        sent = json.dumps(value)
        return lambda: [json.loads(sent)]

    def decide(self, value: Any, decide: Decide, within: float = 0) -> Any:
        """The decision, as the others would receive it."""
        return _as_sent(decide([_as_sent(value)]))

    def fail(self, error: BaseException) -> None:
        """Do nothing: there is no other rank."""

    def sibling(self, name: str) -> Agreement:
        """Return the same agreement, which has no state."""
        return self

    def leave(self) -> None:
        """Do nothing: no other rank waits."""


def _runs(values: Sequence[Any]) -> list[tuple[int, Any]]:
    """Values in their order, as the number of equal ones in a row, and which."""
    runs = ([*each] for _, each in itertools.groupby(values, json.dumps))  # == would take true for 1
    return [(len(run), run[0]) for run in runs]


def _as_sent(value: Any) -> Any:
    """A value as other ranks receive it."""
    return json.loads(json.dumps(value))


def _name(kind: type[BaseException]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _error(name: str, text: str) -> FastckptError:
    """The error that another rank raised; of the base class if this rank does not know its own."""
    kinds = [FastckptError]
    for kind in kinds:  # grows on the way
        if _name(kind) == name:
            return kind(text)
        kinds += kind.__subclasses__()
    return FastckptError(text)


def agreement(world_size: int, name: str = "resume") -> Agreement:
    """The agreement of this job's ranks of this name; raises FastckptError if there is no process group yet."""
    if world_size == 1:
        return SingleRank()
    if not dist.is_initialized():
        raise FastckptError(
            f"load_checkpoint() and resume() are agreements of all {world_size} ranks: call "
            f"torch.distributed.init_process_group() first, on every rank"
        )
    return Agreement(name)


def check_alike(options: Sequence[Mapping[str, str]]) -> None:
    """Raise ConfigError unless all ranks have the same options."""
    for name in options[0]:
        given = [each[name] for each in options]
        if len(set(given)) > 1:
            raise ConfigError(f"{name} must be the same on all ranks; rank by rank it is {given[:8]}")
