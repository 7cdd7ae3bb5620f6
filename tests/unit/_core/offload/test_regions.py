"""Regions never overlap, and the file grows only where no free place is large enough."""

from hypothesis import given
from hypothesis import strategies as st

from fastckpt._core.offload.regions import Region, Regions

UNIT = 4096


@given(st.lists(st.one_of(st.integers(1, 40 * UNIT), st.integers(-8, -1)), max_size=80))
def test_regions_in_use_never_overlap_and_what_is_free_is_known(deeds):
    """A positive number takes so many bytes, a negative one gives a region back."""
    regions, taken = Regions(UNIT), []
    for deed in deeds:
        if deed > 0:
            before, free = regions.end, gaps(taken, regions.end)
            region = regions.take(deed)
            assert region.start % UNIT == 0 and deed <= region.size < deed + UNIT
            assert all(region.end <= other.start or other.end <= region.start for other in taken)
            assert region.end <= regions.end
            fits = any(size >= region.size for size in free)
            assert (regions.end == before) == fits, "it grows exactly if nothing else is left"
            taken.append(region)
        elif taken:
            regions.give_back(taken.pop(deed % len(taken)))
        assert regions.used == sum(region.size for region in taken)
    for region in taken:
        regions.give_back(region)
    assert regions.used == 0
    if regions.end:
        assert regions.take(regions.end) == Region(0, regions.end), "all of it is one piece again"


def gaps(taken: list[Region], end: int) -> list[int]:
    ordered = sorted(taken, key=lambda each: each.start)
    edges = [0, *(edge for region in ordered for edge in (region.start, region.end)), end]
    return [after - before for before, after in zip(edges[::2], edges[1::2], strict=True)]
