"""A loss whose graph holds a dozen tensors of a MiB, and a step that compares its gradient."""

import torch

from fastckpt.offload import ActivationOffload


def some_loss(leaf: torch.Tensor, turns: int = 12) -> torch.Tensor:
    value = leaf
    for _ in range(turns):
        value = (value * 1.01).exp().tanh()
    return value.sum()


def leaf() -> torch.Tensor:
    return torch.randn(512, 512, generator=torch.Generator().manual_seed(1)).requires_grad_()


def settled(offload: ActivationOffload) -> None:
    """Wait until nothing is on its way to the disk."""
    store = offload._offloader._store
    with store._moved:
        assert store._moved.wait_for(lambda: store.in_flight == 0, 60)


def one_step(offload: ActivationOffload) -> bool:
    """Whether its gradient is bitwise that without offloading."""
    mine, theirs = leaf(), leaf()
    with offload:
        loss = some_loss(mine)
    settled(offload)
    loss.backward()
    some_loss(theirs).backward()
    return torch.equal(mine.grad, theirs.grad)
