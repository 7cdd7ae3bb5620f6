"""The rules by which jobs share a place, as a model of which every interleaving is tried.

An old job holds history 1 and has reported (1, 1); others begin whenever they take it for dead, rightly or not. Each
is a row of atomic operations on the place, and may stand still between any two. Rules are left out one at a time.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

RULES = frozenset({"one makes a record", "look behind", "look after", "newer stays", "stop", "look again"})
"""By what `Tenure` and the stores go: exclusive creation, `_look_behind`, `check`, that of two ids at one place the
newer stays, that who is superseded does nothing more, and that who removes one looks for the newer one."""
Id = tuple[int, int]


class Job(NamedTuple):
    """Where a job is, what it holds and resumed, and what it is about to remove."""

    at: str = "choose"
    history: int = 0
    parent: Id = (0, 0)
    saved: int = 0
    retired: Id | None = None
    victims: tuple[Id, ...] = ()


class State(NamedTuple):
    """The place: who made each record, what is under each name (a step), what is retired and still counts; the jobs."""

    records: tuple[int, ...]
    named: frozenset[Id]
    aside: frozenset[Id]
    parents: frozenset[tuple[Id, Id, int]]
    reported: frozenset[Id]
    jobs: tuple[Job, ...]
    sound: bool
    bad: Id | None = None

    @property
    def ids(self) -> frozenset[Id]:
        return self.named | self.aside

    def line(self, newest: Id) -> set[Id]:
        """What a checkpoint came from: its parents, and older ones of the histories of these."""
        line, todo = {newest}, [newest]
        while todo:
            id = todo.pop()
            for child, parent, _ in self.parents:
                before = ({parent} if child == id else set()) | ({child} if child[0] == id[0] and child < id else set())
                todo += before - line
                line |= before
        return line

    def with_job(self, number: int, job: Job, **place: object) -> "State":
        jobs = (*self.jobs[:number], job, *self.jobs[number + 1 :])
        return self._replace(jobs=jobs, **place)  # type: ignore[arg-type]


def violation(state: State) -> str:
    """What must never be; empty if nothing of it is."""
    makers: dict[int, set[int]] = {}
    for id, _, job in state.parents:
        makers.setdefault(id[0], set()).add(job)
    if any(len(jobs) > 1 for jobs in makers.values()):
        return "two jobs save in one history"
    if not state.ids:
        return "nothing is left"
    if state.bad:
        return ""  # what retention has left before it is resumed then
    line = state.line(max(state.ids))
    return next((f"{id} was reported and will not be resumed" for id in sorted(state.reported) if id not in line), "")


def moves(state: State, rules: frozenset[str], saves: int) -> Iterator[tuple[str, State]]:
    """Each next operation of each job; and, once, that the newest checkpoint is found bad and quarantined."""
    if not state.sound and len(state.ids) > 1:
        bad = max(state.ids)
        yield f"{bad} is bad", state._replace(named=state.named - {bad}, aside=state.aside - {bad}, sound=True, bad=bad)
    for number, job in enumerate(state.jobs):
        if job.at != "end":
            for said, after in _OPERATIONS[job.at](state, number, job, rules, saves):
                yield f"job {number} {said}", after


def _superseded(state: State, number: int, rules: frozenset[str]) -> bool:
    return state.records[-1] != number and "stop" in rules


def _choose(state, number, job, rules, saves):
    newest = max(state.ids)
    history = 1 + max(len(state.records), newest[0])
    yield f"will resume {newest}", state.with_job(number, job._replace(at="open", parent=newest, history=history))


def _open(state, number, job, rules, saves):
    if job.history <= len(state.records):
        if "one makes a record" in rules:
            yield f"finds history {job.history} opened", state.with_job(number, job._replace(at="end"))
            return
        records = state.records
    else:
        records = (*state.records, number)
    at = "look behind" if "look behind" in rules else "sweep"
    yield f"opens history {job.history}", state.with_job(number, job._replace(at=at), records=records)


def _look_behind(state, number, job, rules, saves):
    newest = max((id for id in state.ids if id[0] < job.history), default=job.parent)
    yield f"resumes {newest}", state.with_job(number, job._replace(at="sweep", parent=max(newest, job.parent)))


def _sweep(state, number, job, rules, saves):
    named, aside = state.named, state.aside
    for id in sorted(aside, reverse=True):
        there = next((other for other in named if other[1] == id[1]), None)
        aside -= {id}
        if there is None or ("newer stays" in rules and there < id):
            named = named - {there} | {id}
    yield "sweeps", state.with_job(number, job._replace(at="make way"), named=named, aside=aside)


def _own(job: Job) -> Id:
    return job.history, job.parent[1] + 1 + job.saved


def _make_way(state, number, job, rules, saves):
    if job.saved == saves:
        yield "ends", state.with_job(number, job._replace(at="end"))
        return
    there = next((id for id in state.named if id[1] == _own(job)[1]), None)
    if there and there > _own(job) and "newer stays" in rules:
        yield f"finds {there}, which is newer", state.with_job(number, job._replace(at="end"))
    elif there:
        moved = job._replace(at="rename", retired=there)
        yield (
            f"sets {there} aside",
            state.with_job(number, moved, named=state.named - {there}, aside=state.aside | {there}),
        )
    else:
        yield "finds its name free", state.with_job(number, job._replace(at="rename"))


def _rename(state, number, job, rules, saves):
    own = _own(job)
    if any(id[1] == own[1] for id in state.named):
        yield "finds its name taken", state.with_job(number, job._replace(at="make way"))
        return
    parents = state.parents | {(own, job.parent, number)}
    yield (
        f"publishes {own}",
        state.with_job(number, job._replace(at="look"), named=state.named | {own}, parents=parents),
    )


def _look(state, number, job, rules, saves):
    if "look after" in rules and _superseded(state, number, rules):
        yield "is superseded", state.with_job(number, job._replace(at="end"))
    else:
        yield (
            f"reports {_own(job)}",
            state.with_job(number, job._replace(at="drop"), reported=state.reported | {_own(job)}),
        )


def _drop(state, number, job, rules, saves):
    older = "newer stays" not in rules or (job.retired or _own(job)) < _own(job)
    drops = {job.retired} if job.retired and older and (_own(job) in state.ids or "look again" not in rules) else set()
    yield f"drops {drops}", state.with_job(number, job._replace(at="retire", retired=None), aside=state.aside - drops)


def _retire(state, number, job, rules, saves):
    newest = max(state.ids)
    line = state.line(newest)
    victims = tuple(sorted(id for id in state.ids if id < newest and id in line))
    yield f"will delete {victims}", state.with_job(number, job._replace(at="delete", victims=victims))


def _delete(state, number, job, rules, saves):
    if not job.victims:
        yield "goes on", state.with_job(number, job._replace(at="make way", saved=job.saved + 1))
        return
    id, left = job.victims[0], job._replace(victims=job.victims[1:])
    if "look again" in rules and not any(other > id for other in state.ids):
        yield f"keeps {id}", state.with_job(number, left)
    else:
        yield f"deletes {id}", state.with_job(number, left, named=state.named - {id}, aside=state.aside - {id})


_OPERATIONS = {
    "choose": _choose, "open": _open, "look behind": _look_behind, "sweep": _sweep, "make way": _make_way,
    "rename": _rename, "look": _look, "drop": _drop, "retire": _retire, "delete": _delete,
}  # fmt: skip


def explore(rules: frozenset[str], jobs: int = 2, saves: int = 1, *, damage: bool = False) -> tuple[int, str]:
    """How many states there are, and the shortest way to one that must never be; empty if there is none."""
    old = Job("make way", 1)._replace(parent=(1, 1))
    first = State((0,), frozenset({(1, 1)}), frozenset(), frozenset({((1, 1), (0, 0), 0)}), frozenset({(1, 1)}),
                  (old, *[Job()] * (jobs - 1)), not damage)  # fmt: skip
    came: dict[State, tuple[State, str] | None] = {first: None}
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        if wrong := violation(state):
            said, at = [wrong], state
            while (step := came[at]) is not None:
                at = step[0]
                said.append(step[1])
            return len(came), "; ".join(reversed(said))
        for said_now, after in moves(state, rules, saves):
            if after not in came:
                came[after] = state, said_now
                waiting.append(after)
    return len(came), ""
