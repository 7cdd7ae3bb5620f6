"""The place of a worker among nodes, of the variables that launchers set: torchrun's, or those of Slurm and MPI."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from fastckpt.errors import ConfigError

Environment = Mapping[str, str]

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    (
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_NODEID",
        "SLURM_STEP_NUM_NODES",
    ),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "",
        "",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", ""),
)
"""Variables of DeepSpeed, Slurm, Open MPI and MPICH: a worker's rank, the number of ranks, its local rank, the number
of workers on its node (of Slurm of each node, such as ``4,2(x3)``), the node's number and the number of nodes."""
_MASKS = "_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"
"""Endings of the names of variables that limit the devices which a process sees."""
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


class LauncherPlace(NamedTuple):
    """Numbers as `RankInfo` has them, and in words why they cannot be."""

    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    contradiction: str = ""


def launcher_place(environment: Environment, rank: int, world_size: int) -> LauncherPlace:
    """The place of a worker on its node, and among nodes.

    LOCAL_RANK is an index of a device: where each worker sees its own device alone, as with torchrun's
    ``--virtual-local-rank``, it is 0 in all of them. Then the place follows from the other numbers.

    Args:
        environment: Variables of the worker, among them RANK and WORLD_SIZE.
        rank: Its rank.
        world_size: The number of ranks.

    Raises ConfigError for a value that is no number.
    """
    # 1. the number of workers on the node   2. the node's number   3. the local rank: as it is given, unless that is 0
    local, here, node, nodes = _of_launcher(environment, rank, world_size)
    if "LOCAL_WORLD_SIZE" in environment:
        local = node = nodes = None
        here = number(environment, "LOCAL_WORLD_SIZE", 1)
    given, why = number(environment, "LOCAL_RANK", rank if here is None else 0), ""
    if world_size == 1:
        given, here = 0, 1
    elif here is None and given != rank:
        why = _contradiction(environment, "nothing says how many ranks a node has")
    here = world_size if here is None else here
    divides = here > 0 and world_size % here == 0
    node = _first(environment, ("GROUP_RANK", "NODE_RANK"), node, rank // here if divides else 0)
    nodes = _first(environment, ("GROUP_WORLD_SIZE",), nodes, world_size // here if divides else 1)
    if local is None and here * nodes == world_size and ("LOCAL_RANK" not in environment or _sees_one(environment)):
        local = rank - node * here
    if given == 0 and local is not None and 0 <= local < here:
        given = local
    if not (0 <= given < here <= world_size):
        why = _contradiction(environment, f"that is local rank {given} of {here}")
    return LauncherPlace(given, here, node, nodes, why)


def _of_launcher(
    environment: Environment, rank: int, world_size: int
) -> tuple[int | None, int | None, int | None, int | None]:
    """The local rank, the number of workers here, the node and the number of nodes; None for unknown ones.

    A launcher with other numbers has started the process that has started this worker.
    """
    for own, world, local, here, node, nodes in _LAUNCHERS:
        if not {own, world, local, here} <= environment.keys():
            continue
        if (number(environment, own, -1), number(environment, world, -1)) == (rank, world_size):
            found = number(environment, node, -1) if node in environment else None
            count = number(environment, nodes, 1) if nodes in environment else None
            return number(environment, local, 0), _tasks(environment, here, found or 0), found, count
    return None, None, None, None


def _sees_one(environment: Environment) -> bool:
    """Return whether a worker sees exactly one device."""
    masks = [value for name, value in environment.items() if name.endswith(_MASKS)]
    return any(value and "," not in value and value not in ("-1", "NoDevFiles") for value in masks)


def _tasks(environment: Environment, name: str, node: int) -> int:
    """The number of workers of a node, of a text such as ``4,2(x3)``."""
    counts = [int(count) for count, times in _TASKS.findall(environment[name]) for _ in range(int(times or 1))]
    if not counts:
        raise ConfigError(f"{name} is {environment[name]!r}; give a whole number")
    return counts[min(node, len(counts) - 1)]


def _first(environment: Environment, names: tuple[str, ...], known: int | None, otherwise: int) -> int:
    """The number in the first of these variables that is set; else a known one, or one from other numbers."""
    name = next((name for name in names if name in environment), None)
    return number(environment, name, 0) if name else otherwise if known is None else known


def number(environment: Environment, name: str, default: int) -> int:
    """The number in a variable; raises ConfigError for other text."""
    try:
        return int(environment.get(name, default))
    except ValueError as error:
        raise ConfigError(f"{name} is {environment[name]!r}; give a whole number") from error


def _contradiction(environment: Environment, why: str) -> str:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    given = ", ".join(f"{name}={environment[name]}" for name in names if name in environment)
    return (
        f"the environment has {given}: {why}. Start the script with fastckpt-run or torchrun, or set LOCAL_RANK (of "
        "the ranks of this node, from 0), LOCAL_WORLD_SIZE, GROUP_RANK (the node's number) and GROUP_WORLD_SIZE (the "
        "number of nodes) in each worker"
    )
