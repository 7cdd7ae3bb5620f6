"""What is told of workers that arrive: who has joined, and what each has resumed."""

from fastckpt import metrics
from fastckpt.ipc.messages import Hello, Loaded


def joined(hello: Hello, pid: int) -> None:
    """A worker has a checkpointer."""
    metrics.event(
        "worker_joined",
        directory=hello.directory,
        rank=hello.rank,
        local_rank=hello.local_rank,
        worker=pid,
        restart_count=hello.restart_count,
        imported=hello.imported,
    )


def loaded(hello: Hello, message: Loaded) -> None:
    """A worker has its state, or knows that there is none."""
    directory, rank, local_rank, seconds = hello.directory, hello.rank, hello.local_rank, message.seconds
    if not message.tier:
        metrics.event("started_fresh", directory=directory, rank=rank, local_rank=local_rank, seconds=seconds)
        return
    history, step = message.save if len(message.save) == 2 else (-1, -1)
    metrics.event(
        "resumed",
        directory=directory,
        rank=rank,
        local_rank=local_rank,
        step=step,
        history=history,
        tier=message.tier,
        seconds=seconds,
    )
