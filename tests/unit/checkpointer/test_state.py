"""Positions of further loaders of a training run."""

from torch import nn

from fastckpt.checkpointer.gradients import Gradients
from fastckpt.checkpointer.state import TrainingState
from fastckpt.data import ResumableDataLoader


def test_a_second_loader_resumes_at_the_position_of_each_rank() -> None:
    """As with DDP's join, where a rank without a batch has ended its loop before the others."""

    def ranks() -> list[tuple[ResumableDataLoader, TrainingState]]:
        loaders = [ResumableDataLoader(list(range(20)), 2, num_replicas=2, rank=rank) for rank in (0, 1)]
        return [
            (loader, TrainingState({"further": loader}, None, Gradients(nn.Linear(1, 1), [], None, saved=False)))
            for loader in loaders
        ]

    first, again = ranks(), ranks()
    iterators = [iter(loader) for loader, _ in first]
    for rank, count in ((0, 3), (1, 2)):
        for _ in range(count):
            next(iterators[rank])
    (common, _), *_ = states = [parts.state() for _, parts in first]
    for (loader, parts), (_, own), iterator in zip(again, states, iterators, strict=True):
        parts.load(common, own)
        assert next(iter(loader)).tolist() == next(iterator).tolist()
    _, (other, parts) = ranks()
    parts.load(common, {**states[1][1], "positions": {**states[1][1]["positions"], "world": 7}})
    assert other.state_dict() == common["further"], "of another number of ranks"
