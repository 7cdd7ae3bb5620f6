"""Histories that ranks write, and saves in which departed ranks take part."""

from fastckpt._core.format.ids import SaveId
from fastckpt._core.saver.writers import Loan, Writers


def test_all_ranks_of_a_round_write_the_same_history():
    writers = Writers(2)
    assert [writers.join(0, 100, 0), writers.join(1, 101, 1)] == [1, 1]
    assert [writers.next_history(1), writers.next_history(0)] == [2, 2]


def test_a_history_that_another_node_opened_first_is_not_opened_again():
    """The ranks agreed on 8, of which this node had not heard: should the other one be replaced, this one remembers."""
    writers = Writers(1)
    writers.join(0, 100, 0)
    writers.begin(0, SaveId(8, 50))
    writers.restart()
    assert writers.join(0, 200, 0) == 9


def test_a_rank_that_closes_lends_its_part_to_saves_from_its_last_one_on():
    writers = Writers(2)
    for rank in (0, 1):
        writers.join(rank, 100 + rank, 4 + rank)
    writers.begin(1, SaveId(1, 5))
    writers.leave(1, 1, Loan({"rank_5.pt": 8}))
    assert writers.obstacle(SaveId(1, 4)) == "rank 5 has closed"
    assert writers.obstacle(SaveId(1, 5)) == writers.obstacle(SaveId(1, 9)) == ""
    assert [rank for rank, _ in writers.lenders(SaveId(1, 5))] == [1]
    assert writers.all == {0, 1} and not writers.deserted


def test_a_rank_that_closes_and_lends_nothing_ends_all_saves_until_it_joins_again():
    writers = Writers(2)
    for rank in (0, 1):
        writers.join(rank, 100 + rank, rank)
    writers.leave(0, 1)
    assert writers.obstacle(SaveId(1, 9)) == "rank 0 has closed" and not [*writers.lenders(SaveId(1, 9))]
    writers.join(0, 200, 0)
    assert writers.obstacle(SaveId(1, 9)) == "rank 0 has closed" and writers.obstacle(SaveId(2, 1)) == ""


def test_a_rank_that_opens_another_checkpointer_lends_to_the_former_history_alone():
    writers = Writers(2)
    for rank in (0, 1):
        writers.join(rank, 100 + rank, rank)
    writers.begin(1, SaveId(1, 3))
    writers.leave(1, 1, Loan({"rank_1.pt": 8}))
    assert [rank for rank, _ in writers.lenders(SaveId(1, 5))] == [1] and not [*writers.lenders(SaveId(2, 5))]
    assert writers.join(1, 101, 1) == 2
    assert [rank for rank, _ in writers.lenders(SaveId(1, 5))] == [1] and not [*writers.lenders(SaveId(2, 5))]
    assert writers.obstacle(SaveId(2, 5)) == ""
    writers.withdraw(1)
    assert writers.obstacle(SaveId(1, 5)) == "rank 1 has closed"


def test_a_rank_that_ends_without_closing_is_distinguished_from_a_closed_one():
    writers = Writers(1)
    writers.join(0, 100, 0)
    assert not writers.lose(0, 99) and writers.lose(0, 100) and not writers.lose(0, 100)
    assert writers.obstacle(SaveId(1, 1)) == "rank 0 has ended without closing its checkpointer"
    writers.restart()
    assert writers.obstacle(SaveId(1, 1)) == ""


def test_a_rank_of_another_node_that_has_closed_takes_part_in_what_it_saved():
    writers = Writers(1)
    writers.elsewhere = 3, SaveId(1, 6)
    assert writers.obstacle(SaveId(1, 6)) == "" and writers.obstacle(SaveId(1, 7)) == "rank 3 has closed"
    assert writers.obstacle(SaveId(2, 7)) == "", "of another history, which other workers write"


def test_a_rank_that_wrote_its_part_before_leaving_does_not_block_the_save():
    writers = Writers(2)
    writers.join(0, 100, 0)
    writers.begin(0, SaveId(1, 8))
    writers.leave(0, 1)
    assert writers.obstacle(SaveId(1, 8), {1}) == "" and writers.obstacle(SaveId(1, 8), {0, 1}) == "rank 0 has closed"
