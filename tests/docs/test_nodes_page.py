"""The page on several nodes: its table of probabilities is what the functions that place copies say."""

from collections.abc import Mapping
from itertools import combinations
from math import comb
from pathlib import Path

from fastckpt._core.policy.replicas.grouping import Group, ReplicaNode, grouped
from fastckpt._core.policy.replicas.placement import place

PAGE = Path(__file__).parents[2] / "docs/clusters/nodes.md"


def survival(holders: Mapping[str, Group]) -> float:
    """The probability that, of any two nodes that are lost, each has a holder that is left."""
    pairs = combinations(holders, 2)
    return sum(all({*holders[id]} - {*gone} for id in gone) for gone in pairs) / comb(len(holders), 2)


def parity_survival(groups: list[Group]) -> float:
    """The same for groups with parity: each survives the loss of one of its nodes."""
    return 1 - sum(comb(len(group), 2) for group in groups) / comb(sum(map(len, groups)), 2)


def test_probabilities_of_survival_are_those_of_the_placement():
    _, _, table = PAGE.read_text().partition("<!-- survival table -->\n")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    assert len(rows) == 6
    for row in rows:
        hosts, *shown = (cell.strip() for cell in row.strip("|").split("|"))
        nodes = [ReplicaNode(f"host{number}", f"host{number}") for number in range(int(hosts))]
        found = [survival(place(nodes, copies).holders) for copies in (1, 2)]
        found += [parity_survival(grouped(nodes, size)) for size in (4, 8)]
        assert shown == [f"{part:.1%}" for part in found], hosts
