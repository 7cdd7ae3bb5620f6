"""Kills that are planned for a run: spread, reproducible, and where they can come."""

import random

from fastckpt._core.policy.planned_kills import BETWEEN, PERSIST, SAVE, CourseOfRun, plan_kills
from tests.support.tables import for_each


@for_each(*range(10))
def test_kills_are_spread_over_the_steps_between_the_first_save_and_the_end(seed: int):
    chooser = random.Random(seed)
    every, last = chooser.randrange(1, 9), chooser.randrange(20, 400)
    saved = list(range(every, last + 1, every))
    course = CourseOfRun(saved, saved[:: chooser.randrange(1, 4)], last, chooser.randrange(1, 5))
    count = chooser.randrange(1, 9)
    kills = plan_kills(course, count, seed)
    steps = [kill.step for kill in kills]
    assert kills == plan_kills(course, count, seed)
    assert steps == sorted(steps) and len(set(steps)) == len(kills) == count
    assert all(saved[0] < step < last for step in steps)
    for kill in kills:
        assert 0 <= kill.rank < course.ranks and 0 <= kill.skip < 3
        assert kill.kind != SAVE or kill.step in saved
        assert kill.kind != PERSIST or kill.step in course.durable


def test_a_run_with_few_steps_has_few_kills_and_one_without_saves_on_storage_none_in_them():
    assert [kill.step for kill in plan_kills(CourseOfRun([1], [], 4, 1), 5, 0)] == [2, 3]
    assert plan_kills(CourseOfRun([3, 4], [4], 4, 1), 3, 0) == []
    kinds = {kill.kind for kill in plan_kills(CourseOfRun([5, 10, 15, 20, 25], [], 30, 2), 3, 0)}
    assert kinds == {BETWEEN, SAVE}
