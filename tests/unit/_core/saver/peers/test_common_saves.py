"""The newest save that all nodes hold, from what each reports."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.policy.slots import Skip, SlotView, choose_slot
from fastckpt._core.saver.peers.common_saves import EACH, CommonSave, CommonSaves, HeldReport
from fastckpt.errors import ProtocolError
from tests.support.tables import for_each

NOTHING = CommonSave()


def saves(*steps: int) -> frozenset[SaveId]:
    return frozenset(SaveId(1, step) for step in steps)


def report(member: str, *steps: int, keeping: int = 0) -> HeldReport:
    return HeldReport(member, saves(*steps), SaveId(1, keeping) if keeping else None)


def agree(
    common: CommonSaves, held: Mapping[str, Iterable[int]], digests: Mapping[str, str] | None = None
) -> CommonSave:
    """All report what they hold again and again, and do what they are told, until nothing changes."""
    answers = dict.fromkeys(held, NOTHING)
    for _ in range(6):
        for member, steps in held.items():
            last = answers[member]
            keeping = last.next if last.next in saves(*steps) else None
            compared = last.compare if digests else None
            sent = HeldReport(member, saves(*steps), keeping, True, compared, {"m": digests[member]} if digests else {})
            answers[member] = common.report(sent)
    return answers[member]


def test_only_what_all_have_reported_is_common():
    common = CommonSaves(["a", "b", "c"])
    assert agree(common, {"a": [1, 2, 3], "b": [2, 3]}).next is None
    assert agree(common, {"a": [1, 2, 3], "b": [2, 3], "c": [1, 2]}).id == SaveId(1, 2)
    with pytest.raises(ProtocolError, match="not in this round"):
        common.report(report("d", 1))


def test_the_next_common_save_counts_when_every_node_keeps_it_and_another_takes_its_place_if_one_cannot():
    common = CommonSaves(["a", "b"])
    common.report(report("a", 1))
    assert common.report(report("b", 1)) == CommonSave(None, SaveId(1, 1))
    assert common.report(report("b", 1, keeping=1)).id is None
    assert common.report(report("a", 1, keeping=1)).id == SaveId(1, 1)
    common = CommonSaves(["a", "b"])
    common.report(report("a", 1))
    assert common.report(report("b", 1)).next == SaveId(1, 1)
    common.report(report("b", 2))
    assert common.report(report("a", 1, 2)).next == SaveId(1, 2)


@for_each((True, True, True), (True, False, True))
def test_a_save_counts_as_replicated_only_if_every_node_has_copied_it(copied: Sequence[bool]):
    common, has = CommonSaves("abc"), dict(zip("abc", copied, strict=True))
    for member in "abc":
        common.report(report(member, 1))
    answers = [common.report(replace(report(member, 1, keeping=1), copied=has[member])) for member in "cab"]
    assert [answer.id for answer in answers] == [None, None, SaveId(1, 1)]
    assert [answer.is_replicated for answer in answers] == [False, False, all(copied)]
    # A copy of the last save says nothing of the next one, and the last one stays replicated until that is common.
    common._alike, common._compare = True, None  # comparisons have tests of their own
    for member in "abc":
        answer = common.report(replace(report(member, 1, 2), copied=has[member]))
    assert (answer.id, answer.next, answer.is_replicated) == (SaveId(1, 1), SaveId(1, 2), all(copied))
    for member in "abc":
        answer = common.report(replace(report(member, 1, 2, keeping=2), copied=member != "b"))
    assert (answer.id, answer.is_replicated) == (SaveId(1, 2), False)


@for_each(True, False)
def test_the_first_common_save_is_compared_and_each_tenth_from_then_on(alike: bool):
    common, compared = CommonSaves(["a", "b"]), []
    for step in range(1, 3 * EACH + 1):
        answer = agree(common, {"a": [step], "b": [step]})
        assert answer.id == SaveId(1, step)
        if answer.compare is not None:
            compared.append(answer.compare.step)
            digests = {"a": "x", "b": "x" if alike else "y"}
            assert agree(common, {"a": [step], "b": [step]}, digests).alike is alike
    assert compared == ([1, EACH + 1, 2 * EACH + 1] if alike else [*range(1, 3 * EACH + 1)])


def test_while_a_save_is_compared_it_stays_the_common_one_unless_a_node_gives_it_up():
    common = CommonSaves(["a", "b"])
    assert agree(common, {"a": [1], "b": [1]}).compare == SaveId(1, 1)
    assert agree(common, {"a": [1, 2], "b": [1, 2]}).id == SaveId(1, 1)
    assert agree(common, {"a": [2], "b": [1, 2]}).id == SaveId(1, 2)


class Node(NamedTuple):
    """A node: what its slots hold, how far it trained, what it was told of, and its report on its way."""

    slots: tuple[int, ...] = ()
    step: int = 0
    told: tuple[SaveId | None, ...] = (None, None)
    report: tuple[frozenset[SaveId], SaveId | None] | None = None

    def sent(self) -> "Node":
        held = saves(*self.slots)
        return self._replace(report=(held, self.told[1] if self.told[1] in held else None))


@cache
def saved(node: Node, count: int) -> Node:
    views = [SlotView(SaveId(1, each), committed=True) for each in node.slots]
    choice = choose_slot(views + [SlotView()] * (count - len(views)), {}, [id for id in node.told if id])
    step, slots = node.step + 1, node.slots
    if not isinstance(choice, Skip):
        slots = (*slots[:choice], step, *slots[choice + 1 :])
    return node._replace(step=step, slots=slots)


class Commons:
    """What the agent that joins reports may know: each a number, from which a report leads to another one."""

    def __init__(self) -> None:
        first = CommonSaves("ab")
        first._alike = True  # comparisons have tests of their own
        self._known, self._numbers = list[CommonSaves](), dict[object, int]()
        self._number(first)

    def _number(self, common: CommonSaves) -> int:
        key = (common._id, common._next, *sorted(common._held.items()), *sorted(common._keeping.items()))
        if key not in self._numbers:
            self._numbers[key] = len(self._known)
            self._known.append(common)
        return self._numbers[key]

    def has_common(self, number: int) -> bool:
        return self._known[number]._id is not None

    @cache  # noqa: B019
    def after(self, number: int, member: str, held: frozenset[SaveId], keep: SaveId | None) -> tuple[int, CommonSave]:
        of, common = self._known[number], CommonSaves("ab")
        vars(common).update({k: v.copy() if isinstance(v, dict) else v for k, v in vars(of).items() if k != "_changed"})
        answer = common.report(HeldReport(member, held, keep))
        return self._number(common), answer


def test_in_no_order_of_saves_skips_and_reports_do_two_nodes_lose_their_common_save():
    """Exhaustive: saves, skips for other reasons, reports that stay behind, answers that come late, in any order.

    Two nodes of two slots train three steps; ranks train in step. Once there is a common save, there is always a save
    that both hold.
    """
    count, steps, commons = 2, 3, Commons()
    todo = [(Node(), Node(), 0, False)]
    seen = {*todo}
    while todo:
        *nodes, common, had = todo.pop()
        had = had or commons.has_common(common)
        assert not had or set(nodes[0].slots) & set(nodes[1].slots), nodes
        after = list[tuple[int, Node, int]]()
        for number, node in enumerate(nodes):
            if node.step < min(steps, nodes[1 - number].step + 1):
                after += [(number, node._replace(step=node.step + 1), common), (number, saved(node, count), common)]
            if node.report is None:
                after.append((number, node.sent(), common))
            else:
                then, answer = commons.after(common, "ab"[number], *node.report)
                # What it protects is noted first; what it still holds is read for the next report.
                told = (answer.id or node.told[0], answer.next)
                after.append((number, node._replace(report=None, told=told), then))
        for number, node, then in after:
            state = (node, nodes[1], then, had) if number == 0 else (nodes[0], node, then, had)
            if state not in seen:
                seen.add(state)
                todo.append(state)
    assert len(seen) > 5000
