"""Drains of hosts that are refused, as a table."""

from fastckpt._core.policy.hosts.host_drain import refusal
from tests.support.tables import for_each


@for_each(
    ("b", "abc", "", 3, "", "the job needs 3 nodes (--nnodes), and without b it would have 2"),
    ("b", "abc", "d", 3, "", ""),
    ("b", "abc", "b", 3, "", "it would have 2, with 0 that wait"),  # a spare on the same host is no help
    ("b", "abb", "", 2, "", "it would have 1"),  # two agents on one host
    ("a", "a", "", 0, "", "it would have 0"),
    ("s", "ab", "s", 2, "", ""),  # one that waits is drained whatever the job needs
    ("a", "abc", "", 2, "a", "a holds the store of the rendezvous, and no other host may"),
    ("a", "abc", "", 2, "ab", ""),
)
def test_a_drain_is_refused_without_which_the_job_cannot_go_on(
    host: str, members: str, spares: str, fewest: int, stores: str, why: str
) -> None:
    found = refusal(host, members, spares, fewest, stores)
    assert why in found and bool(found) == bool(why)
