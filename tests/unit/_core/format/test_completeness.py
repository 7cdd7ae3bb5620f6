"""Completeness of a checkpoint for the ranks that saved it, by the names of its files."""

from typing import Any

from fastckpt._core.format.completeness import RANKS, missing_files
from tests.support.tables import for_each

OF_TWO = {RANKS: {"0": ["model.pt", "rank_0.pt"], "1": ["rank_1.pt"]}}
SHARDS = {".metadata", "__0_0.distcp"}

TABLE: list[tuple[str, set[str], int, dict[str, Any], list[str]]] = [
    ("all are there", {"model.pt", "rank_0.pt", "rank_1.pt"}, 2, OF_TWO, []),
    ("more than all", {"model.pt", "rank_0.pt", "rank_1.pt", "rank_2.pt"}, 2, OF_TWO, []),
    ("a file of a rank is missing", {"model.pt", "rank_0.pt"}, 2, OF_TWO, ["rank_1.pt"]),
    ("the common file is missing", {"rank_0.pt", "rank_1.pt"}, 2, OF_TWO, ["model.pt"]),
    ("a rank has written nothing", {"a"}, 2, {RANKS: {"0": ["a"], "1": []}}, []),
    ("a rank took no part", {"a"}, 2, {RANKS: {"0": ["a"]}}, ["the files of rank 1"]),
    ("of an earlier version", {"model.pt", "rank_0.pt", "rank_1.pt"}, 2, {}, []),
    ("of an earlier version, a rank had left", {"model.pt", "rank_0.pt"}, 2, {}, ["rank_1.pt"]),
    ("of an earlier version, of a framework", {"latest", "states/0.pt"}, 8, {}, []),
    ("of an earlier version, shards of one node", SHARDS, 2, {}, []),
    ("of an earlier version, shards of two nodes", SHARDS, 2, {"nodes": 2}, ["__1_0.distcp"]),
    ("nonsense", {"model.pt", "rank_0.pt"}, 1, {RANKS: [1]}, []),
    ("nonsense of a rank", {"a"}, 1, {RANKS: {"0": 7}}, ["the files of rank 0"]),
]


@for_each(*TABLE)
def test_a_checkpoint_without_files_of_each_rank_is_incomplete(
    names: set[str], world: int, details: dict[str, Any], missing: list[str]
) -> None:
    assert missing_files(names, world, details) == missing
