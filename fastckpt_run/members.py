"""The agents of one round: each learns the ids, memory and addresses of all others."""

import json
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch.distributed as dist

from fastckpt._core.error_codes import coded
from fastckpt._core.version import VERSION
from fastckpt.errors import ConfigError

UNASSIGNED = -1
"""The slot of an agent that has been in no round yet."""
_LIST, _SECRET = "fastckpt/members", "fastckpt/secret"
_PAUSE = 0.02
"""Seconds between two looks at a list of an earlier round."""


@dataclass(frozen=True)
class Member:
    """One agent of a round.

    Attributes:
        id: Unique id of the agent process.
        host: Its host's name, for people to read.
        memory: Id that agents share which use one directory of shared memory.
        slot: Its number among these, from 0 on; it keeps it from round to round.
        address: Address at which it serves files to the others, HOST:PORT; empty if it does not.
        watch: Address at which it answers that it lives, HOST:PORT; empty if it does not.
        launch: The name by which histories know it.
        version: The version of fastckpt that it runs.
        checks: Number of node checks with others so far; -1 if it takes part in none.
        replicas: Its `--fast-replicas`, which is the same for all.
        domain: Its failure domain.
        partners: The agents that keep something for it, or it for them, as of the last round.
        marks: The marks of the checkpoint directories in which it has saved, by directory.
    """

    id: str
    host: str
    memory: str
    slot: int = UNASSIGNED
    address: str = ""
    watch: str = ""
    launch: str = ""
    version: str = VERSION
    checks: int = -1
    replicas: str = "0"
    domain: str = ""
    partners: Sequence[str] = ()
    marks: Mapping[str, str] = field(default_factory=dict, compare=False)


def drawn_secret(store: "dist.distributed_c10d.Store", group_rank: int) -> bytes:
    """A secret that the first agent draws for all, unless it has, and the store hands out: to whoever can read it."""
    if group_rank == 0 and not store.check([_SECRET]):
        store.set(_SECRET, secrets.token_hex(32))
    store.wait([_SECRET])
    return store.get(_SECRET)


def exchange(store: "dist.distributed_c10d.Store", group_rank: int, group_world_size: int, own: Member) -> list[Member]:
    """All agents of a round, in the order of group ranks; at most 4 messages for each.

    Args:
        store: The store of this round. One that outlives rounds will do: each waits for a list that names itself.
        group_rank: The rank of this agent.
        group_world_size: The number of agents.
        own: This agent.

    Raises:
        ConfigError: Two agents run unlike versions, or are to make unlike copies; in all agents alike.
        torch.distributed.DistStoreError: An agent did not come.
    """
    if group_world_size == 1:
        return with_slots([own])
    # The first collects and answers all: no agent reads the record of each other.
    store.set(f"{_LIST}/{group_rank}", json.dumps(asdict(own)))
    if group_rank == 0:
        keys = [f"{_LIST}/{rank}" for rank in range(group_world_size)]
        store.wait(keys)
        members = with_slots([_member(store.get(key)) for key in keys])
        store.set(_LIST, json.dumps([asdict(member) for member in members]))
    else:
        members = _list_with(own, store)
    _check_alike(members)
    return members


def with_slots(members: Sequence[Member]) -> list[Member]:
    """The same, each with a slot that no other has in its memory; an agent with one keeps it."""
    taken: set[tuple[str, int]] = set()
    kept = []
    for member in members:
        is_free = member.slot != UNASSIGNED and (member.memory, member.slot) not in taken
        kept.append(member if is_free else replace(member, slot=UNASSIGNED))
        taken |= {(member.memory, member.slot)} if is_free else set()
    found = []
    for member in kept:
        slot = member.slot
        if slot == UNASSIGNED:
            slot = next(n for n in range(len(members)) if (member.memory, n) not in taken)
            taken.add((member.memory, slot))
        found.append(replace(member, slot=slot))
    return found


def _list_with(own: Member, store: "dist.distributed_c10d.Store") -> list[Member]:
    """The list that the first agent has made, once it names this one: an earlier one may be there still."""
    while True:
        store.wait([_LIST])
        members = [_member(json.dumps(each).encode()) for each in json.loads(store.get(_LIST))]
        if any(member.id == own.id for member in members):
            return members
        time.sleep(_PAUSE)


def host_for(master: str, group_rank: int, local_addr: str | None) -> str:
    """The name or address of this host by which the agents of the others reach it.

    Args:
        master: The address of the first node, which all of them reach.
        group_rank: The rank of this one.
        local_addr: The address that the user has given; None for none.
    """
    if local_addr or group_rank == 0:
        return local_addr or master
    family, kind, protocol, _, target = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing: the kernel chooses the interface that leads there
        host: str = probe.getsockname()[0]
    return host


def _member(data: bytes) -> Member:
    record: dict[str, Any] = json.loads(data)
    return Member(**{name: record[name] for name in Member.__dataclass_fields__ if name in record})


def _check_alike(members: Sequence[Member]) -> None:
    if unlike := next((member for member in members if member.version != members[0].version), None):
        raise ConfigError(
            coded(
                f"nodes run unlike versions of fastckpt: {members[0].host} has {members[0].version}, {unlike.host} has "
                f"{unlike.version}. Install the same on all nodes.",
                "FC-034",
            )
        )
    if unlike := next((member for member in members if member.replicas != members[0].replicas), None):
        raise ConfigError(
            f"--fast-replicas is {members[0].replicas} on {members[0].host} and {unlike.replicas} on {unlike.host}: "
            "give all nodes the same"
        )
