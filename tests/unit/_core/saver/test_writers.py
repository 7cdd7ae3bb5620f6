"""Histories that ranks write, and saves in which departed ranks take part."""

from fastckpt._core.format.ids import SaveId
from fastckpt._core.saver.writers import Loan, Writers


def joined(*ranks: int) -> Writers:
    """Local ranks 0 and 1, of these numbers."""
    writers = Writers(len(ranks))
    for local, rank in enumerate(ranks):
        assert writers.join(local, 100 + local, rank) == 1
    return writers


def lenders(writers: Writers, save: SaveId) -> list[int]:
    return [rank for rank, _ in writers.lenders(save)]


def test_all_ranks_of_a_round_write_the_same_history_and_none_that_another_node_has_opened():
    """The ranks agreed on 8, of which this node had not heard: should the other one be replaced, this one remembers."""
    writers = joined(0, 1)
    assert [writers.next_history(1), writers.next_history(0)] == [2, 2]
    writers.begin(0, SaveId(8, 50))
    writers.restart()
    assert writers.join(0, 200, 0) == 9


def test_a_rank_that_closes_lends_its_part_to_saves_of_its_history_from_its_last_one_on():
    writers = joined(4, 5)
    writers.begin(1, SaveId(1, 5))
    writers.leave(1, 1, Loan({"rank_5.pt": 8}))
    assert writers.obstacle(SaveId(1, 4)) == "rank 5 has closed"
    assert writers.obstacle(SaveId(1, 5)) == writers.obstacle(SaveId(1, 9)) == ""
    assert writers.all == {0, 1} and not writers.deserted
    assert lenders(writers, SaveId(1, 5)) == [1] and lenders(writers, SaveId(2, 5)) == []
    assert writers.join(1, 101, 5) == 2  # it opens another checkpointer
    assert lenders(writers, SaveId(1, 5)) == [1] and lenders(writers, SaveId(2, 5)) == []
    assert writers.obstacle(SaveId(2, 5)) == ""
    writers.withdraw(1)
    assert writers.obstacle(SaveId(1, 5)) == "rank 5 has closed"


def test_a_rank_that_closes_and_lends_nothing_ends_all_saves_but_those_with_its_part_until_it_joins_again():
    writers = joined(0, 1)
    writers.begin(0, SaveId(1, 8))
    writers.leave(0, 1)
    assert writers.obstacle(SaveId(1, 9)) == "rank 0 has closed" and lenders(writers, SaveId(1, 9)) == []
    assert writers.obstacle(SaveId(1, 8), {1}) == "" and writers.obstacle(SaveId(1, 8), {0, 1}) == "rank 0 has closed"
    writers.join(0, 200, 0)
    assert writers.obstacle(SaveId(1, 9)) == "rank 0 has closed" and writers.obstacle(SaveId(2, 1)) == ""


def test_a_rank_that_ends_without_closing_is_distinguished_from_a_closed_one():
    writers = joined(0)
    assert not writers.lose(0, 99) and writers.lose(0, 100) and not writers.lose(0, 100)
    assert writers.obstacle(SaveId(1, 1)) == "rank 0 has ended without closing its checkpointer"
    writers.restart()
    assert writers.obstacle(SaveId(1, 1)) == ""


def test_a_rank_of_another_node_that_has_closed_takes_part_in_what_it_saved():
    writers = Writers(1)
    writers.elsewhere = 3, SaveId(1, 6)
    assert writers.obstacle(SaveId(1, 6)) == "" and writers.obstacle(SaveId(1, 7)) == "rank 3 has closed"
    assert writers.obstacle(SaveId(2, 7)) == "", "of another history, which other workers write"
