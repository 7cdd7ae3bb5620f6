"""The page on several nodes: its table of probabilities is what the functions that place copies say."""

from pathlib import Path

import pytest

from fastckpt._core.policy.replicas.grouping import ReplicaNode, grouped
from fastckpt._core.policy.replicas.placement import place
from tests.docs.survival import parity_survival, survival

PAGE = Path(__file__).parents[2] / "docs/clusters/nodes.md"


def rows() -> list[str]:
    """The rows of the page's table, by the number of hosts, of which two are lost."""
    _, _, table = PAGE.read_text().partition("<!-- survival table -->\n")
    return table.partition("\n\n")[0].splitlines()[2:]


@pytest.mark.parametrize("row", rows())
def test_probabilities_of_survival_are_those_of_the_placement(row: str):
    hosts, *shown = (cell.strip() for cell in row.strip("|").split("|"))
    nodes = [ReplicaNode(f"host{number}", f"host{number}") for number in range(int(hosts))]
    found = [survival(place(nodes, copies).holders, 2) for copies in (1, 2)]
    found += [parity_survival(grouped(nodes, size), 2) for size in (4, 8)]
    assert shown == [f"{part:.1%}" for part in found]
