"""Whether to set a snapshot aside in the memory of its device before it is copied to the host's, by what that cost."""

from collections.abc import Sequence
from statistics import median

NOTICEABLE = 0.001
"""Seconds of a stall below which there is nothing to gain."""
TRIALS = 2
"""Snapshots that are set aside to see what that costs."""


def pays(straight: Sequence[float], aside: Sequence[float]) -> bool:
    """Whether it stalls training less, or is worth a trial; it takes longer until a snapshot has arrived.

    The choice of CheckFreq (Mohan et al., FAST'21, Algorithm 1) between memory of the device and of the host, by
    stalls that were measured instead of those that follow from times of copies.

    Args:
        straight: Seconds that training waited for each snapshot that was copied to the host at once; empty for none.
        aside: The same of those that were set aside.
    """
    if not straight or median(straight) < NOTICEABLE:
        return False
    return len(aside) < TRIALS or median(aside) < median(straight)
