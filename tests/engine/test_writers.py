"""Which history each rank writes."""

from fastckpt.engine.writers import Writers
from fastckpt.format.ids import SaveId


def test_all_ranks_of_a_round_write_the_same_history():
    writers = Writers(2)
    assert [writers.join(0, 100), writers.join(1, 101)] == [1, 1]
    assert [writers.next_history(1), writers.next_history(0)] == [2, 2]


def test_a_history_that_another_node_knew_first_is_not_opened_again():
    """The ranks agreed on 8, of which this node had not heard: should the other one be replaced, this one remembers."""
    writers = Writers(1)
    writers.join(0, 100)
    writers.begin(0, SaveId(8, 50))
    writers.restart()
    assert writers.join(0, 200) == 9
