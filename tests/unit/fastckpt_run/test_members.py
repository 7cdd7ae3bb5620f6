"""Agents of a round that learn of each other over its store."""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch.distributed as dist

from fastckpt._core.config import Settings
from fastckpt.errors import ConfigError
from fastckpt_run.members import Member, drawn_secret, exchange, host_for, with_slots


def member(number: int, memory: str = "", slot: int = -1) -> Member:
    return Member(f"agent-{number}", f"host-{number}", memory or f"memory-{number}", slot, f"host-{number}:{number}")


def meet(stores: Sequence[Any], members: Sequence[Member]) -> list[Any]:
    def take_part(rank: int) -> Any:
        try:
            return exchange(stores[rank], rank, len(members), members[rank])
        except ConfigError as error:
            return str(error)  # not the error, whose traceback has the store

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(take_part, range(len(members))))


def stores(count: int) -> list[Any]:
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [first, *(dist.TCPStore("127.0.0.1", first.port) for _ in range(1, count))]


def test_the_first_agent_draws_one_secret_for_all_and_all_get_one_list_of_this_round():
    opened = stores(3)
    with ThreadPoolExecutor(3) as pool:
        drawn = [*pool.map(drawn_secret, opened, range(3))]
    assert drawn == [drawn[0]] * 3 and len(drawn[0]) == 64
    assert drawn_secret(opened[0], 0) == drawn[0]

    results = meet(opened, [member(number) for number in range(3)])
    assert results == [results[0]] * 3 and [each.id for each in results[0]] == ["agent-0", "agent-1", "agent-2"]
    # The store outlives the round, as that of a static rendezvous does; the second agent was started again meanwhile.
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(exchange, opened[1], 1, 2, member(3))
        while b"agent-3" not in opened[0].get("fastckpt/members/1"):
            sleep(0.01)
        results = [exchange(opened[0], 0, 2, member(0)), second.result()]
    assert all([each.id for each in found] == ["agent-0", "agent-3"] for found in results)


def test_agents_of_unlike_versions_or_copies_refuse_each_other_by_name():
    for unlike, why in (
        ({"version": "0.0.1"}, "host-1 has 0.0.1"),
        ({"replicas": "xor:4"}, "--fast-replicas is 0 on host-0 and xor:4 on host-1: give all nodes the same"),
    ):
        results = meet(stores(2), [member(0), replace(member(1), **unlike)])
        assert all(isinstance(each, str) and why in each for each in results)


def test_a_failure_domain_comes_from_a_name_a_file_or_a_variable_and_not_from_others(tmp_path, monkeypatch):
    (tmp_path / "rack").write_text("rack7\n")
    monkeypatch.setenv("RACK", " rack8 ")  # as another host may have it without spaces
    names = ["", "rack6", f"file:{tmp_path}/rack", "env:RACK"]
    assert [Settings(domain=each).failure_domain() for each in names] == ["", "rack6", "rack7", "rack8"]
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("long").write_text("r" * (10 << 20))
    Path("lines").write_text("rack7\nrack8\n")
    Path("binary").write_bytes(b"rack\xff")
    for given, why in UNNAMED:
        with pytest.raises(ConfigError, match=re.escape(f"domain is {given!r}{why}")):
            Settings(domain=given).failure_domain()


UNNAMED = [
    ("file:/nowhere/rack", "; /nowhere/rack cannot be read: No such file or directory"),
    ("file:/dev/null", "; /dev/null is empty"),
    ("env:NO_SUCH_VARIABLE", "; NO_SUCH_VARIABLE is not set or empty"),
    (" ", "; it is empty"),
    *((f"file:{name}", "") for name in ("/dev/zero", "a\0b", "pipe", "long", "lines", "binary")),
]


def test_agents_that_share_memory_have_slots_of_their_own_and_one_alone_needs_no_store():
    for given, slots in (
        ([("a", -1), ("b", -1)], [0, 0]),  # hosts of their own
        ([("a", -1), ("a", -1), ("b", -1)], [0, 1, 0]),
        ([("a", -1), ("a", 0)], [1, 0]),  # who has one keeps it, whatever its rank
        ([("a", 1), ("a", -1)], [1, 0]),
        ([("a", 0), ("a", 0)], [0, 1]),  # two jobs have become one
        ([("a", 5), ("a", -1), ("a", -1)], [5, 0, 1]),
    ):
        members = [member(number, memory, slot) for number, (memory, slot) in enumerate(given)]
        assert [each.slot for each in with_slots(members)] == slots
    assert host_for("first", 0, None) == "first"
    assert host_for("first", 1, "10.0.0.7") == "10.0.0.7"
    assert host_for("127.0.0.1", 1, None) == "127.0.0.1"
    assert exchange(None, 0, 1, member(5)) == [replace(member(5), slot=0)]
