"""The node whose loss leaves the fewest copies, for each set of up to four nodes."""

import itertools

import pytest

from fastckpt._core.policy.replicas.margins import NodeMargin, smallest


@pytest.mark.parametrize("count", range(4))
def test_the_smallest_margin_is_that_of_no_node_that_another_comes_before(count: int):
    """All numbers of copies and sizes of up to 2, in each order of nodes."""
    for values in itertools.product(itertools.product(range(3), range(3)), repeat=count):
        margins = [NodeMargin(rank, copies, size) for rank, (copies, size) in enumerate(values)]
        found = smallest(margins)
        large = [each for each in margins if each.size]
        assert (found is None) == (not large)
        if found is not None:
            assert found in large
            fewest = [each for each in large if each.copies == min(other.copies for other in large)]
            largest = [each for each in fewest if each.size == max(other.size for other in fewest)]
            assert found.rank == min(each.rank for each in largest)
        assert all(smallest(order) == found for order in itertools.permutations(margins))
