"""Detection of hung ranks and of the culprit: tables, without processes."""

from math import inf

from fastckpt._core.policy.hangs import IDLE, LAST, LONG, Limits, Observation, Witness, culprits, hung, limits, occupied
from tests.support.tables import for_each

MINUTE = 60.0
GLOO = 1800.0


@for_each(
    ("off", 1.0, 0, {}, Limits(inf, inf)),
    ("5", 100.0, 7, {"sees_all": False, "may_restart": False}, Limits(5.0, 50.0)),
    ("auto", 0.1, 0, {"patience": 0.0}, Limits(LONG, LONG, LONG, told=IDLE)),
    ("auto", 0.1, 0, {}, Limits(LONG, LONG, GLOO / 2, told=IDLE)),
    ("auto", 0.1, 0, {"patience": 100.0}, Limits(LONG, LONG, IDLE, told=IDLE)),
    ("auto", 600.0, 0, {}, Limits(12000.0, 12000.0, 12000.0, told=900.0)),
    ("auto", 0.1, 2, {}, Limits(4 * LONG, 4 * LONG, 2 * GLOO, told=IDLE)),
    ("auto", 0.1, 0, {"sees_all": False}, Limits(LONG, LONG)),
    ("auto", 1.0, 0, {"may_restart": False}, Limits(LAST, LAST, LONG, told=IDLE)),
)
def test_limits_follow_from_setting_pace_patience_and_false_alarms(setting, pace, alarms, options, expected):
    assert limits(setting, pace, alarms, **{"patience": GLOO} | options) == expected


@for_each("5", "auto")
def test_the_limit_of_a_start_is_longer_than_earlier_starts(setting):
    slow = limits(setting, 1.0, start=9000.0)
    for silent, expected in ((26999, []), (27001, [0])):
        assert hung([Observation(0, silent)], slow, 0) == expected
        assert hung([Observation(0, silent), Observation(1, silent, 9, waited=silent)], slow, 0) == expected
    assert hung([Observation(0, 3700, 9, "save")], slow, 0) == [0], "that is no start"
    assert hung([Observation(0, 3700, 9)], slow, 0) == [0]


def test_a_rank_that_waited_for_another_is_not_late_when_that_one_is_done():
    evaluates, waits = Observation(0, 800, 9, "evaluation", 900), Observation(1, 803, 9, waited=799)
    assert occupied([evaluates, waits], SECONDS)
    assert hung([Observation(0, 0.1, 9), waits], SECONDS, 0) == []
    assert hung([Observation(0, 5.1, 9), Observation(1, 808.1, 9, waited=800)], SECONDS, 0) == [0, 1]
    assert not occupied([Observation(0, 901, 9, "evaluation", 900), waits], SECONDS)
    assert not occupied([waits], SECONDS)


SECONDS = Limits(5.0, 50.0)
AUTO = Limits(LONG, LONG, MINUTE)


@for_each(
    ("all take steps", SECONDS, [Observation(0, 1, 9), Observation(1, 4.9, 9)], 0, False),
    ("a first step is slow", SECONDS, [Observation(0, 49), Observation(1, 49)], 0, False),
    ("a first step is too slow", SECONDS, [Observation(0, 51, waited=50), Observation(1, 49, 1)], 0, True),
    ("one waits for the first step of another", SECONDS, [Observation(0, 30, 1), Observation(1, 30)], 0, False),
    ("a long save", SECONDS, [Observation(0, 49, 9, "save"), Observation(1, 49, 9)], 0, False),
    ("a phase of unknown length", SECONDS, [Observation(0, 49, 9, "evaluation")], 0, False),
    ("a phase beyond its limit", SECONDS, [Observation(0, 901, 9, "evaluation", 900, 800)], 0, True),
    ("a phase with a short limit", SECONDS, [Observation(0, 2, 9, "load", 1), Observation(1, 2, 9)], 0, True),
    ("all wait for one phase", SECONDS, [Observation(0, 800, 9, "x", 900), Observation(1, 800, 9)], 0, False),
    ("one of two is late", SECONDS, [Observation(0, 800, 9, "x", 900), Observation(1, 60, 9, "y")], 0, False),
    ("idle for a minute", AUTO, [Observation(0, 70, 9), Observation(1, 70, 9)], 61, True),
    ("silent for a minute, but at work", AUTO, [Observation(0, 70, 9), Observation(1, 70, 9)], 1, False),
    ("silent for an hour, at work", AUTO, [Observation(0, LONG + 1, 9), Observation(1, LONG - 1, 9)], 1, True),
    ("idle before the first step", AUTO, [Observation(0, 70), Observation(1, 70, 1)], 61, False),
    ("idle at its exit", AUTO, [Observation(0, 70, 9, "exit"), Observation(1, 70, 9)], 61, True),
    ("a slow exit", SECONDS, [Observation(0, 49, 9, "exit"), Observation(1, 49, 9)], 0, False),
    ("idle in a save", AUTO, [Observation(0, 70, 9, "save"), Observation(1, 70, 9)], 61, False),
    ("idle in a phase", AUTO, [Observation(0, LONG + 9, 9, "x", 9000), Observation(1, LONG, 9)], 5000, False),
    ("off", Limits(inf, inf), [Observation(0, 1e9, 9)], 1e9, False),
)
def test_ranks_count_as_hung_beyond_their_limits(what, limits, sights, idle, expected):
    assert bool(hung(sights, limits, idle)) is expected, what
    assert sorted(hung(sights[::-1], limits, idle)) == hung(sights, limits, idle), what


def waits(rank: int, steps: int = 9, place: str = "barrier", **fields) -> Witness:
    return Witness(rank, steps, waits=True, place=place, **fields)


def gone(rank: int, steps: int = 9) -> Witness:
    return Witness(rank, steps, state="", has_left=True)


@for_each(
    ([Witness(0)], [0], "hangs"),
    ([Witness(0, 9, "T"), waits(1, 3)], [0], "stopped"),
    ([Witness(0, 9, "D"), Witness(1, 9, "T")], [1], "stopped"),
    ([waits(0), Witness(1)], [1], "is not where the others wait"),
    ([waits(0), Witness(1, 9), Witness(2, 8)], [2], "is not where the others wait"),
    ([Witness(0, 9), Witness(1, 8)], [1], "fewer steps"),
    ([waits(0, 9), waits(1, 8)], [1], "fewer steps"),
    ([Witness(0), Witness(1)], [0, 1], "which of them is to blame is not known"),
    ([waits(0), waits(1, place="backward"), waits(2)], [1], "elsewhere than most"),
    ([waits(0), waits(1, place="backward")], [0, 1], "not known"),
    ([waits(0), Witness(1, has_left=True)], [1], "has ended, or is about to"),
    ([Witness(0, 5, goes_on=True), Witness(1, 9)], [1], "hangs"),
    ([Witness(0, 5, goes_on=True), gone(1)], [1], "has ended"),
)
def test_the_culprit_of_a_hang_is_found_with_its_reason(witnesses, blamed, reason):
    found, why = culprits(witnesses, sees_all=True)
    assert [each.rank for each in found] == blamed
    assert reason in why


def test_the_culprit_of_a_hang_may_be_on_another_node():
    found, why = culprits([waits(0), waits(1)], sees_all=False)
    assert ([each.rank for each in found], why) == ([0, 1], "waits, perhaps for a rank of another node")
    found, _ = culprits([waits(0), Witness(1)], sees_all=False)
    assert [each.rank for each in found] == [1]
