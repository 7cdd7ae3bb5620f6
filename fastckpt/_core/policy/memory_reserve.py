"""Memory that is left to others, and the slots that fit into the rest."""

RESERVE = 64 << 20
"""Bytes left to all others, or a share of the limit if that is less."""
LEAST, ENOUGH = 20, 2
"""The share of a small limit that is left: a twentieth; or half, so that data loaders find room in docker's 64 MB."""


def reserve(total: int, share: int) -> int:
    """Bytes of a limit of ``total`` that are left to others, at most 1/``share`` of it."""
    return min(RESERVE, total // share)


def share_of(slots: int) -> int:
    """The share that is left while an arena has so many slots: less once there are but the two that it must have."""
    return ENOUGH if slots > 2 else LEAST


def limit_for(size: int, slots: int, beside: int = 0) -> int:
    """The least limit in bytes that lets each of ``slots`` slots have ``size`` bytes, with the reserve.

    Args:
        size: Bytes of a slot.
        slots: Their number.
        beside: Bytes that others take of the same limit.
    """
    wanted, share = slots * size + beside, share_of(slots)
    # total - min(RESERVE, total // share) >= wanted holds if either of both does.
    return min(wanted + RESERVE, (wanted - 1) * share // (share - 1) + 1) if wanted else 0


def slots_that_fit(size: int, free: int, total: int, most: int = 3) -> int:
    """The slots of ``size`` bytes that an arena gets of ``most`` if ``free`` bytes of a limit are free: 3, 2, or 0."""
    for slots in range(most, 1, -1):
        if slots * size <= free - reserve(total, share_of(slots)):
            return slots
    return 0
