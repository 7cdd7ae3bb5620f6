"""The place of a worker, of the variables that launchers set; also where each worker sees its own device alone."""

import os
from pathlib import Path

import pytest

from fastckpt._core.config import AGENT_VARIABLE, PLACE_VARIABLE, RankInfo
from fastckpt._core.launcher_places import launcher_place
from fastckpt.ddp import DdpCheckpointer
from fastckpt.errors import ConfigError
from tests.support.tables import for_each

MASKED = {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0"}


def numbers(**values: int) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def torchrun(rank: int, *nodes: int, masked: bool = False) -> dict[str, str]:
    """What torchrun sets for a rank on nodes of so many ranks."""
    node = next(node for node in range(len(nodes)) if rank < sum(nodes[: node + 1]))
    sizes = {"LOCAL_WORLD_SIZE": nodes[node], "GROUP_RANK": node, "GROUP_WORLD_SIZE": len(nodes)}
    found = numbers(RANK=rank, WORLD_SIZE=sum(nodes), LOCAL_RANK=rank - sum(nodes[:node]), **sizes)
    return found | (MASKED if masked else {})


def place(environment: dict[str, str]) -> tuple[int, ...]:
    *numbers, why = launcher_place(environment, int(environment["RANK"]), int(environment["WORLD_SIZE"]))
    assert not why
    return tuple(numbers)


@for_each((4,), (2, 2), (1, 1, 1), (3, 2, 1))
def test_torchrun_tells_the_place_of_each_rank_also_where_each_sees_its_own_device_alone(nodes: tuple[int, ...]):
    expected = [(local, here, node, len(nodes)) for node, here in enumerate(nodes) for local in range(here)]
    assert [place(torchrun(rank, *nodes)) for rank in range(sum(nodes))] == expected
    if len({*nodes}) == 1:
        assert [place(torchrun(rank, *nodes, masked=True)) for rank in range(sum(nodes))] == expected


def slurm(rank: int, local: int, node: int, tasks: str, **more: str) -> dict[str, str]:
    own = numbers(SLURM_PROCID=rank, SLURM_LOCALID=local, SLURM_NODEID=node, RANK=rank, WORLD_SIZE=5)
    sizes = numbers(SLURM_STEP_NUM_NODES=2, SLURM_STEP_NUM_TASKS=5)
    return own | sizes | {"SLURM_STEP_TASKS_PER_NODE": tasks} | more


def mpi(rank: int, world: int, here: int, names: tuple[str, str, str, str]) -> dict[str, str]:
    return numbers(**dict(zip(names, (rank, rank % here, here, world), strict=True)), RANK=rank, WORLD_SIZE=world)


OPEN_MPI = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"


@for_each(
    ("slurm", slurm(1, 1, 0, "3,2"), (1, 3, 0, 2)),
    ("slurm, one device per task", slurm(4, 1, 1, "3,2", **MASKED), (1, 2, 1, 2)),
    ("slurm, counted", slurm(2, 2, 0, "3(x1),2", LOCAL_RANK="2"), (2, 3, 0, 2)),
    ("mpirun, one device", mpi(3, 4, 2, OPEN_MPI) | MASKED, (1, 2, 1, 2)),
    ("torchrun by srun", torchrun(1, 4) | {"SLURM_PROCID": "1", "SLURM_NODEID": "1"}, (1, 4, 0, 1)),
    ("by hand, one node", numbers(RANK=3, WORLD_SIZE=4), (3, 4, 0, 1)),
    ("workers of a task of slurm", slurm(0, 0, 0, "1", SLURM_STEP_NUM_TASKS="1", LOCAL_RANK="0"), (0, 5, 0, 1)),
    ("a child of its own", torchrun(0, 8) | {"WORLD_SIZE": "1"}, (0, 1, 0, 1)),
    ("no device", torchrun(3, 3, 2, 1) | {"CUDA_VISIBLE_DEVICES": "-1"}, (0, 2, 1, 3)),
    ("ray", numbers(RANK=3, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2, NODE_RANK=1, LOCAL_RANK=1), (1, 2, 1, 2)),
    ("one rank, device 3", numbers(RANK=0, WORLD_SIZE=1, LOCAL_RANK=3), (0, 1, 0, 1)),
    ("deepspeed", numbers(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_SIZE=4, CROSS_RANK=1, CROSS_SIZE=2), (1, 4, 1, 2)),
)
def test_other_launchers_tell_it_in_variables_of_their_own(environment: dict[str, str], expected: tuple[int, ...]):
    assert place(environment) == expected


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", **MASKED}, "nothing says how many ranks a node has"),
        (torchrun(1, 2) | {"LOCAL_RANK": "2"}, "that is local rank 2 of 2"),
        (torchrun(1, 2) | {"LOCAL_WORLD_SIZE": "0"}, "that is local rank 1 of 0"),
    ],
)
def test_what_contradicts_itself_is_refused_at_construction(
    environment: dict[str, str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in os.environ if name.endswith(("RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert RankInfo.from_environment().rank == int(environment["RANK"])
    with pytest.raises(ConfigError, match=why):
        DdpCheckpointer(tmp_path)


def test_the_agent_tells_its_workers_whatever_local_rank_says():
    by_agent = {AGENT_VARIABLE: "x", PLACE_VARIABLE: "4 1"}
    own = RankInfo.from_environment(torchrun(4, 3, 2, 1, masked=True) | by_agent)
    assert (own.local_rank, own.local_world_size, own.group_rank) == (1, 2, 1)
    for other in (torchrun(1, 2), torchrun(4, 6)):
        local = RankInfo.from_environment(other | by_agent).local_rank
        assert local == int(other["LOCAL_RANK"]), "a job that a worker starts has ranks of its own"
