"""Counts of a saver: when all that the next start could resume is durable."""

from fastckpt._core.format.ids import SaveId
from fastckpt._core.saver.stats import SaverStats
from tests.support.tables import for_each


def save(step: int | None) -> SaveId | None:
    return None if step is None else SaveId(1, step)


@for_each((None, None, None, True), (5, 4, None, False), (5, None, None, False), (5, 4, 3, True), (5, 3, 4, False))
def test_a_save_that_not_all_nodes_are_known_to_hold_need_not_be_durable(
    wanted: int | None, durable: int | None, common: int | None, is_stored: bool
) -> None:
    stats = SaverStats("checkpoints", wanted=save(wanted), durable=save(durable), common=save(common))
    assert stats.is_stored == is_stored
