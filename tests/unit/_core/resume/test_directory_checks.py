"""Nodes that see unlike marks of one checkpoint directory do not share it."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.config import RankInfo
from fastckpt._core.resume.directory_checks import LISTED, Seen, check_one, check_shared, mark_seen
from fastckpt._core.storage.local.identity import mark as mark_directory
from fastckpt.errors import ConfigError
from tests.support.tables import for_each

HOST = socket.gethostname()


class Heard:
    """An agreement in which the others say, when they look again, what is given here."""

    def __init__(self, later: list[Seen | None], rank: int = 0) -> None:
        self._later, self._rank = later, rank

    def gather(self, value: Any) -> list[Any]:
        return [*self._later[: self._rank], value, *self._later[self._rank :]]


def of_node(node: int, nodes: int = 2, local_rank: int = 0) -> RankInfo:
    return RankInfo(node, local_rank, nodes, 1, node, nodes)


def test_the_first_rank_of_each_of_several_nodes_checks_the_directory(tmp_path: Path) -> None:
    mark = mark_directory(tmp_path, "1" * 32)
    assert mark and mark_seen(str(tmp_path), of_node(1)) == (1, HOST, mark)
    assert mark_seen(str(tmp_path), of_node(1, local_rank=1)) is None
    assert mark_seen("memory://restarted/workers", replace(of_node(1), restart_count=1)) is None


def test_checking_a_directory_writes_nothing_and_never_fails(tmp_path: Path) -> None:
    """As on a disk which no agent could mark, or one that does not answer."""
    (tmp_path / ".fastckpt/identity").mkdir(parents=True)
    before = list(tmp_path.rglob("*"))
    assert mark_seen(str(tmp_path), of_node(1)) == (1, HOST, "")
    assert list(tmp_path.rglob("*")) == before


@for_each(["a", "", "a"], ["", "", ""], ["", "a", None])
def test_missing_or_unreadable_marks_do_not_count_as_unlike(marks: list[str | None]) -> None:
    said = [None if mark is None else (node, HOST, mark) for node, mark in enumerate(marks)]
    check_shared(Heard([]), "anywhere", of_node(0, 3), said)


def test_nodes_that_marked_a_store_at_once_check_it_again(tmp_path: Path) -> None:
    mark = mark_directory(tmp_path, "1" * 32)
    check_shared(Heard([(1, HOST, mark)]), str(tmp_path), of_node(0), [(0, HOST, "overwritten"), (1, HOST, mark)])


def test_unlike_marks_are_refused_by_all_ranks_naming_a_limited_number_of_nodes(tmp_path: Path) -> None:
    """Two directories, as two disks below one name; the third node cannot mark its own."""
    disks = [tmp_path / str(node) for node in range(3)]
    for disk in disks:
        disk.mkdir()
    mark_directory(disks[0], "1" * 32)
    mark_directory(disks[1], "2" * 32)
    marks = [mark_seen(str(disk), of_node(node, 3)) for node, disk in enumerate(disks)]
    named = rf"is not the same directory on all nodes: nodes 0 \({HOST}\) have one; nodes 1 \({HOST}\) have another\. "
    for node, disk in enumerate(disks):
        with pytest.raises(ConfigError, match=f"{disk} {named}"):
            check_shared(Heard(marks[:node] + marks[node + 1 :], node), str(disk), of_node(node, 3), marks)
    said: list[Seen | None] = [(node, "host", "one" if node < 100 else f"own {node}") for node in range(200)]
    with pytest.raises(ConfigError, match=rf"\(host\) and {100 - LISTED - 1} more have one") as error:
        check_shared(Heard(said[1:]), str(disks[2]), of_node(0, 200), said)
    assert len(str(error.value)) < 1500


@for_each(
    ([(0, "/ck"), (0, "/ck")], ()),
    ([(0, "/ck/0"), (0, "/ck/1")], ("rank 0 saves to /ck/0", "rank 1 to /ck/1")),
    ([(0, "/ck"), (1, "/mnt/ck"), (0, "/ck"), (1, "/mnt/ck")], ()),  # one file system, mounted at two places
    ([(0, "/ck"), (1, "/ck"), (0, "/ck"), (1, "/ck/3")], ("rank 1 saves to /ck", "rank 3 to /ck/3")),
)
def test_ranks_of_a_node_that_have_unlike_directories_are_refused(places: list[Any], named: tuple[str, ...]) -> None:
    if not named:
        check_one(places)
        return
    with pytest.raises(ConfigError, match="Give all ranks one checkpoint directory") as error:
        check_one(places)
    assert all(text in str(error.value) for text in named)
