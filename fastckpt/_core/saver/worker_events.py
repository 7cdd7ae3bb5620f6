"""Events of workers: each that joins, the checkpoint that it resumed, how often the job saves."""

from fastckpt._core import metrics
from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc.messages import Decided, Hello, Loaded
from fastckpt._core.ipc.offload_messages import OffloadMessage, record_offload
from fastckpt._core.saver.stats import SaverStats


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


def record(hello: Hello, pid: int, message: Loaded | Decided | OffloadMessage, stats: SaverStats) -> None:
    """A worker has its state, or knows that there is none; the ranks have decided how often to save; or it offloads."""
    if isinstance(message, OffloadMessage):
        record_offload(hello.rank, pid, message)
        return
    if isinstance(message, Decided):
        metrics.event("frequency", directory=hello.directory, **vars(message))
        return
    directory, rank, local_rank, seconds = hello.directory, hello.rank, hello.local_rank, message.seconds
    stats.load(SaveId(*message.save) if message.tier and len(message.save) == 2 else None)
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
