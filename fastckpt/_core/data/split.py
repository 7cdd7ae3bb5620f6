"""Shares of a step's samples among ranks: a pure function of the global cursor."""

import enum
from dataclasses import dataclass

import torch.distributed as dist

from fastckpt._core.config import RankInfo
from fastckpt.errors import ConfigError


class Remainder(enum.Enum):
    """Treatment of the end of an epoch, if it is less than a whole batch for every rank."""

    PAD = "handed out, the last row filled up from the beginning of the epoch: all ranks get equally many"
    EVEN = "handed out but for the last incomplete row, fewer samples than ranks: all ranks get equally many"
    DROP = "dropped"
    UNEVEN = "handed out: some ranks get one sample less, and those that get none have no batch"


@dataclass(frozen=True)
class Split:
    """One rank's share of each step. A step takes ``world * batch`` samples, the ranks in turn: a row has one for each.

    Attributes:
        rank: This rank.
        world: Number of ranks.
        batch: Samples per rank and step.
        rest: The treatment of the end of an epoch.

    Raises:
        ConfigError: Rank, world or batch is out of range.
    """

    rank: int
    world: int
    batch: int = 1
    rest: Remainder = Remainder.PAD

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"batch_size is {self.batch}; give 1 or more, or None for samples one by one")
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"rank is {self.rank} of {self.world}; give 0 to {max(self.world - 1, 0)}")

    def taken(self, cursor: int, length: int) -> int:
        """The number of samples that the step at ``cursor`` uses of an epoch, on all ranks; 0 at its end."""
        left = max(length - cursor, 0)
        whole = self.world * self.batch
        if left >= whole or self.rest is Remainder.PAD or self.rest is Remainder.UNEVEN:
            return min(left, whole)
        return left - left % self.world if self.rest is Remainder.EVEN else 0

    def positions(self, cursor: int, length: int) -> range:
        """This rank's part of that step, as positions in the epoch; those from ``length`` on stand for its beginning.

        Position ``length + i`` is position ``i`` again, and so on in circles if there are more ranks than samples.
        """
        taken = self.taken(cursor, length)
        # Padding fills only the last row, so that each rank gets equally many; at most world - 1 samples are repeated.
        rows = -(-taken // self.world) * self.world if self.rest is Remainder.PAD else taken
        # A stride of the world size, as DistributedSampler's: neighbouring samples go to different ranks.
        return range(cursor + self.rank, cursor + rows, self.world)

    def steps(self, length: int) -> int:
        """The number of batches that this rank gets in a whole epoch."""
        whole, cursor = self.world * self.batch, length - length % (self.world * self.batch)
        return length // whole + (1 if self.positions(cursor, length) else 0)


def rank_and_world(rank: int | None, world: int | None) -> tuple[int, int]:
    """Complete rank and world from torch.distributed, or before it is initialized from the launcher's variables."""
    if dist.is_available() and dist.is_initialized():
        # The process group before the environment: a script may have formed one without a launcher.
        default = dist.get_rank(), dist.get_world_size()
    else:
        place = RankInfo.from_environment()
        default = place.rank, place.world_size
    return default[0] if rank is None else rank, default[1] if world is None else world


def check_joined(rank: int, world: int) -> None:
    """Raise ConfigError if the job has more ranks now than when the samples were divided among them."""
    if world == 1 and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"this was made before init_process_group() for rank {rank} of 1, and there are {dist.get_world_size()} "
            "ranks now: each would get all samples. Make it after that, or give num_replicas and rank"
        )
