"""Choice of the checkpoint that a job resumes, beside all choices that there are."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._core.policy.resume import TIERS, CheckpointLocation, choose

tiers = st.sampled_from(["memory", "mixed", "storage"])
bits = st.integers(0, 1)
candidates = st.sets(
    st.builds(CheckpointLocation, bits, bits, tiers, bits, st.sampled_from(["", "a", "b"])), max_size=8
)


def one_save(plan: tuple[CheckpointLocation, ...]) -> bool:
    return len({(c.id, c.attempt, "" if c.attempt else c.tier) for c in plan}) == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(candidates, max_size=3), candidates, st.randoms())
def test_the_choice_is_the_best_save_that_every_rank_has_and_each_rank_makes_it(reports, excluded, random):
    choice = choose(reports, excluded)
    plans = [plan for plan in itertools.product(*(report - excluded for report in reports)) if one_save(plan)]
    assert (choice is None) == (not plans)
    if choice is not None:
        ours = [plan for plan in plans if plan[0].id == max(plan[0].id for plan in plans)]
        distances = {plan: sum(TIERS.index(candidate.tier) for candidate in plan) for plan in ours}
        assert choice in ours and distances[choice] == min(distances.values())
    shuffled = [dict.fromkeys(random.sample(sorted(report), len(report))) for report in reports]
    assert choose(shuffled, excluded) == choice
