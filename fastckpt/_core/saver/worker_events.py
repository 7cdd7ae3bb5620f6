"""What workers tell of themselves, as events: who has joined, what each has resumed, how often they save."""

from fastckpt._core import metrics
from fastckpt._core.ipc.messages import Decided, Hello, Loaded


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


def told(hello: Hello, message: Loaded | Decided) -> None:
    """A worker has its state, or knows that there is none; or the ranks have decided how often to save."""
    _loaded(hello, message) if isinstance(message, Loaded) else _decided(hello, message)


def _loaded(hello: Hello, message: Loaded) -> None:
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


def _decided(hello: Hello, message: Decided) -> None:
    metrics.event(
        "frequency",
        directory=hello.directory,
        step=message.step,
        memory=message.memory,
        storage=message.storage,
        overhead=message.overhead,
        bound=message.bound,
        changed=message.changed,
        why=message.why,
    )
