"""The least memory with which the transfers of a step hide behind its computation."""

from fastckpt._core.policy.offload_plan import StepProfile, plan

TOLERATED = 0.02
"""The share of a step that waits may take and still count as hidden: profiled times vary by more."""
PRECISION = 1 / 64
"""The share of all that is saved to which the budget is found."""
WORK = 4_000
"""Tensors in all plans that are tried for one budget: a few hundredths of a second."""


def least_budget(profile: StepProfile) -> int:
    """Bytes that suffice for a plan whose predicted wait is next to nothing."""
    total = sum(each.size for each in profile.tensors)
    most = TOLERATED * (profile.forward + profile.backward)
    # With a budget of four times the largest tensor, that alone fills the quarter that may be on the way out.
    low = min(total, 4 * max((each.size for each in profile.tensors), default=0))
    high = total
    while high - low > max(1, total * PRECISION):
        middle = (low + high) // 2
        if plan(profile, middle, work=WORK).predicted_wait <= most:
            high = middle
        else:
            low = middle
    return high if plan(profile, low, work=WORK).predicted_wait > most else low
