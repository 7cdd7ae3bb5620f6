"""A call that fails in an agent or a worker, by a library preloaded into both, breaks nothing that was promised.

What was promised to be durable, or in memory, is what resumes, bit for bit; no process hangs; the job goes on, and a
later one does; nothing is left in memory; and errors name what failed. Cases are told in `case`.
"""

import re
from collections.abc import Iterator

import pytest

from tests.failing_calls.case import PROCEDURES
from tests.failing_calls.page import PLACES, Fault, compiler, sweep
from tests.failing_calls.server import Server

TELLING = [
    # Memory that cannot be had, or not be written to: the save is skipped, with the reason.
    ("save", "ENOSPC at fallocate by agent in memory", "slot-"),
    ("persist", "ENOSPC at write by rank 1 in memory", ".done-1"),
    # A record that could not be read is not a record that is not there.
    ("persist", "EMFILE at open by agent in memory", "slot-1/.done-1"),
    ("resume from memory", "EMFILE at open by rank 1 in memory", ".done-0"),
    ("adoption", "EIO at read 3 by agent in memory", "owner"),
    # Storage that refuses once: it is tried again.
    ("persist", "short at write by agent in storage", "model.pt"),
    ("retention", "EIO at unlink by agent in storage", "model.pt"),
    ("flush", "ENOMEM at mmap by agent in memory", "model.pt"),
    # No answer says nothing of a checkpoint; damage does.
    ("resume from storage", "ESTALE at read 3 by rank 1 in storage", "checkpoint-2/rank_1.pt"),
    ("resume from storage", "EIO at read by rank 1 in storage", "checkpoint-2/model.pt"),
]
"""Procedure, what fails there, the first such call or the one of a number, and what the path of it has in it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if compiler() is None:
        pytest.skip("no C compiler (cc or gcc)")
    made = Server(tmp_path_factory.mktemp("failing_calls"))
    yield made
    made.close()


@pytest.mark.parametrize(("procedure", "what", "name"), TELLING)
def test_a_call_that_fails_once_breaks_no_promise(server: Server, procedure: str, what: str, name: str) -> None:
    error, call, number, role, place = re.fullmatch(r"(\w+) at (\w+) ?(\d*) by (.*) in (\w+)", what).groups()
    fault = Fault(role, place, call, int(number or 1), error, name=name)
    outcome = server.run(procedure, fault.place, fault)
    assert outcome["where"], "it was not reached"
    assert not outcome["bad"], outcome


@pytest.mark.campaign
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("procedure", PROCEDURES)
def test_each_call_fails_once_in_each_way(server: Server, procedure: str, place: str) -> None:
    """Those of a run in which nothing fails: each that is reached again, with each error that it may have."""
    sound = server.run(procedure, place)
    assert not sound["bad"], sound
    reached, broken, faults = 0, [], sweep(place, sound["made"])
    for fault in faults:
        outcome = server.run(procedure, place, fault)
        reached += bool(outcome["where"])
        if outcome["bad"]:
            broken.append(f"{fault}, {outcome['where']}: {outcome['bad']}")
    print(f"{procedure}, {place}: {reached} calls failed, {len(broken)} broke a promise")
    assert not broken, "\n".join(broken)
    assert reached or not faults
