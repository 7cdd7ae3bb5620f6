"""Three nodes that lose sight of each other, as a model of which every interleaving is tried.

A round of all three holds history 1, in which (1, 1) was reported and the parts of (1, 2) are written. Then nodes form
other rounds, in which each is alone or with others, for whatever reason: a link that is down, a death, an agent that
stands still. What they decide is decided by the functions of the product. A node is a row of operations on the
directory, and may stand still between any two, or die.
"""

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from fastckpt._core.format.ids import SaveId
from fastckpt._core.saver.persistence import succession
from fastckpt._core.saver.persistence.succession import Party
from fastckpt._core.storage.history import Record

FIRST, OTHER = SaveId(1, 1), SaveId(1, 2)
ALL = (0, 1, 2)
Rounds = tuple[tuple[int, ...], ...]
"""Each forms once, at any time, of those who live; the first member opens histories."""


class Opened(NamedTuple):
    """A record, as `Record` has it."""

    history: int
    token: str
    launch: int
    members: tuple[int, ...]
    parent: SaveId


class Node(NamedTuple):
    """An agent: its round, what it is about to do as the first of that, and with what it has a part of."""

    round: int = 0
    at: str = "idle"
    passed: int = 1
    history: int = 1
    parent: SaveId = SaveId(0, 0)
    todo: frozenset[tuple[SaveId, str, str]] = frozenset()
    is_lost: bool = False
    is_alive: bool = True


class State(NamedTuple):
    """The directory: records, checkpoints and of whom they are; what was reported; the rounds that were; the nodes."""

    records: tuple[Opened, ...]
    ids: frozenset[SaveId]
    savers: frozenset[tuple[SaveId, str]]
    reported: frozenset[SaveId]
    rounds: tuple[tuple[int, ...], ...]
    nodes: tuple[Node, Node, Node]

    def set(self, number: int, node: Node, **place: object) -> "State":
        nodes = (*self.nodes[:number], node, *self.nodes[number + 1 :])
        return self._replace(nodes=nodes, **place)  # type: ignore[arg-type]


@lru_cache(None)
def record(opened: Opened) -> Record:
    members = tuple(map(str, opened.members)) if len(opened.members) > 1 else ()
    return Record(opened.history, opened.token, str(opened.launch), "/run", {}, members, opened.parent, "")


@lru_cache(None)
def party(number: int, round: tuple[int, ...]) -> Party:
    return Party(str(number), "/run", frozenset(map(str, round)), str(round[0]))


def newest(state: State) -> Record:
    return record(state.records[-1])


@lru_cache(None)
def line(records: tuple[Opened, ...], id: SaveId) -> frozenset[SaveId]:
    """What a checkpoint came from."""
    found = set[SaveId]()
    while id.history:
        found |= {SaveId(id.history, step) for step in range(id.step + 1)}
        id = next((each.parent for each in records if each.history == id.history), SaveId(0, 0))
    return frozenset(found)


Moves = Iterator[tuple[str, State]]


def violation(state: State) -> str:
    """What must never be; empty if nothing of it is."""
    tokens: dict[int, set[str]] = {}
    for id, token in state.savers:
        tokens.setdefault(id.history, set()).add(token)
    if any(len(each) > 1 for each in tokens.values()):
        return "two halves publish in one history"
    if not state.ids:
        return "nothing is left"
    if lost := max(state.reported) not in state.ids and max(state.ids) < max(state.reported):
        return "the newest durable checkpoint is gone" if lost else ""
    if left := state.reported - line(state.records, max(state.ids)):
        return f"{max(left)} was reported and will not be resumed"
    holder = state.records[-1].launch
    for number, node in enumerate(state.nodes):
        if node.is_alive and node.is_lost:
            # The round that it joins is one with the holder, or, if that is dead, one of all that it reaches.
            joined = tuple(each for each in ALL if state.nodes[each].is_alive)
            if holder in joined and not succession.may_follow(party(joined[0], joined), newest(state), has_died=False):
                return f"node {number} is refused for ever"
    return ""


def moves(state: State, formed: Rounds, losses: int) -> Moves:
    """Each next operation of each node; that one dies; that some form another round."""
    alive = [number for number in ALL if state.nodes[number].is_alive]
    for members in formed:
        if {*members} <= {*alive} and members not in state.rounds:
            yield f"{members} form a round", _form(state, members)
    for number in alive:
        node = state.nodes[number]
        if 3 - len(alive) < losses and len(alive) > 1:
            yield f"{number} dies", state.set(number, Node(is_alive=False))
        if not node.is_lost:
            for text, after in _acts(state, number, node):
                yield f"{number} {text}", after


def _form(state: State, members: tuple[int, ...]) -> State:
    """They form a round, whatever the others do; it begins with the first one's look at the directory."""
    after = state._replace(rounds=(*state.rounds, members))
    for number in members:
        # What this process was about to publish is its own, and goes on: in the round of then, as another party.
        node = state.nodes[number]._replace(round=len(state.rounds), is_lost=False)
        after = after.set(number, node._replace(at="enter" if number == members[0] else "idle"))
    return after


def _lose(state: State, number: int) -> State:
    return state.set(number, state.nodes[number]._replace(is_lost=True, at="idle", todo=frozenset()))


def _acts(state: State, number: int, node: Node) -> Moves:
    own = party(number, state.rounds[node.round])
    for todo in node.todo:
        yield _complete(state, number, node, own, todo)
    if node.at != "idle":
        yield from _FIRST[node.at](state, number, node, own)


def _complete(state: State, number: int, node: Node, own: Party, todo: tuple[SaveId, str, str]) -> tuple[str, State]:
    """Publish what all parts are there of; then look, and report it."""
    id, token, at = todo
    rest = node.todo - {todo}
    if at == "publish":
        after = node._replace(todo=rest | {(id, token, "look")})
        if id in state.ids or max(state.ids) > id:
            return f"finds {id}", state.set(number, after)
        return f"publishes {id}", state.set(number, after, ids=state.ids | {id}, savers=state.savers | {(id, token)})
    if not succession.may_report(own, id, token, newest(state)):
        return "is superseded", _lose(state, number)
    read = {each.history: record(each) for each in state.records}
    counts = succession.is_continued(id, newest(state).history, read.get)
    reported = state.reported | {id} if counts and id in state.ids else state.reported
    at = "choose" if node.at == "idle" and own.first == own.launch and counts else node.at
    return f"reports {id}", state.set(number, node._replace(todo=rest, at=at), reported=reported)


def _enter(state: State, number: int, node: Node, own: Party) -> Moves:
    if not succession.may_follow(own, newest(state), has_died=not state.nodes[state.records[-1].launch].is_alive):
        yield "finds that others go on", _lose(state, number)
        return
    parent = max(state.ids)
    entered = node._replace(at="open", passed=newest(state).history, parent=parent)
    number_of = 1 + max(newest(state).history, parent.history)
    yield f"resumes {parent}", state.set(number, entered._replace(history=number_of))


def _token(node: Node) -> str:
    return f"round {node.round}"


def _open(state: State, number: int, node: Node, own: Party) -> Moves:
    last = newest(state)
    if last.history > node.passed and not own.has_opened(last, ""):
        yield "finds a newer history", _lose(state, number)
    else:
        yield "looks", state.set(number, node._replace(at="create", passed=last.history))


def _create(state: State, number: int, node: Node, own: Party) -> Moves:
    there = next((each for each in state.records if each.history == node.history), None)
    if there is not None and not own.has_opened(record(there), _token(node)):
        yield "finds its history taken", _lose(state, number)
        return
    members = state.rounds[node.round]
    made = Opened(node.history, _token(node), number, members, node.parent)
    records = state.records if there else tuple(sorted((*state.records, made)))
    yield f"opens {node.history}", state.set(number, node._replace(at="look behind"), records=records)


def _look_behind(state: State, number: int, node: Node, own: Party) -> Moves:
    last = newest(state)
    if last.history > node.history and not own.has_opened(last, ""):
        yield "finds a newer history", _lose(state, number)
    elif any(node.parent < id and id.history < node.history for id in state.ids):
        yield "starts over", state.set(number, node._replace(at="enter", passed=last.history))
    else:
        yield "goes on", state.set(number, node._replace(at="save"))


def _save(state: State, number: int, node: Node, own: Party) -> Moves:
    id = SaveId(node.history, node.parent.step + 1)
    after = state.set(number, node._replace(at="idle"))
    if all(state.nodes[each].round == node.round and not state.nodes[each].is_lost for each in map(int, own.round)):
        for each in map(int, own.round):
            other = after.nodes[each]
            after = after.set(each, other._replace(todo=other.todo | {(id, _token(node), "publish")}))
    yield f"saves {id}", after  # a part is missing where one of them has left, or died


def _choose(state: State, number: int, node: Node, own: Party) -> Moves:
    """What is to be deleted: all older ones of its own line; held as the newest that it knows."""
    yield "will delete", state.set(number, node._replace(at="delete", parent=max(state.ids)))


def _delete(state: State, number: int, node: Node, own: Party) -> Moves:
    victims = {id for id in state.ids if id < node.parent and id in line(state.records, node.parent)}
    if not any(id >= node.parent for id in state.ids):
        victims = set()
    yield f"deletes {victims}", state.set(number, node._replace(at="idle"), ids=state.ids - victims)


_FIRST = {
    "enter": _enter, "open": _open, "create": _create, "look behind": _look_behind, "save": _save,
    "choose": _choose, "delete": _delete,
}  # fmt: skip


def explore(formed: Rounds, losses: int = 0) -> tuple[int, str]:
    """How many states there are, and the shortest way to one that must never be; empty if there is none."""
    parts = Node(todo=frozenset({(OTHER, "round 0", "publish")}))
    opened = Opened(1, "round 0", 0, ALL, SaveId(0, 0))
    start = State(
        (opened,), frozenset({FIRST}), frozenset({(FIRST, "round 0")}), frozenset({FIRST}), (ALL,), (parts,) * 3
    )
    came: dict[State, tuple[State, str] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        if wrong := violation(state):
            said, at = [wrong], state
            while (step := came[at]) is not None:
                at = step[0]
                said.append(step[1])
            return len(came), "; ".join(reversed(said))
        for text, after in moves(state, formed, losses):
            if after not in came:
                came[after] = state, text
                waiting.append(after)
    return len(came), ""
