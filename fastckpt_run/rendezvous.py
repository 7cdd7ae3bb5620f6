"""Make each rendezvous of a job start without what the last one left in its stores, and without needless waits."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous


def forget_last_round(handler: RendezvousHandler) -> None:
    """Forget the store in which the workers of the last round met; call when they are dead.

    Else the next workers read there the addresses of their dead predecessors and fail to connect, which
    costs an attempt. A c10d handler is made to open a fresh store, on a fresh port. A static one shares its
    store, on the port that the user named, with the workers: that is emptied. With several nodes the static
    store is left alone, because another node's agent may be in its next round already.
    """
    if isinstance(handler, DynamicRendezvousHandler):
        handler._bootstrap_store_info = None
        handler._shared_tcp_store_server = None
    elif isinstance(handler, StaticTCPRendezvous) and handler.world_size == 1 and handler._store is not None:
        for key in handler._store.list_keys():
            handler._store.delete_key(key)


@contextmanager
def hastened(handler: RendezvousHandler) -> Iterator[None]:
    """While this lasts, one node alone waits for nobody, and names for torch's records are had cheaply.

    torch lets a node wait up to 0.3 s, so that not all come at once; and it looks up the source lines of the whole
    stack to find the name of one function, 8 times in each rendezvous, 8 ms each time.
    """
    torchs: Any = dynamic_rendezvous
    delay, name = torchs._delay, torchs.get_method_name

    def delay_unless_alone(seconds: float | tuple[float, float]) -> None:
        if not (alone and isinstance(seconds, tuple)):
            delay(seconds)

    alone = isinstance(handler, DynamicRendezvousHandler) and handler.settings.max_nodes == 1
    torchs._delay, torchs.get_method_name = delay_unless_alone, _name_of_caller
    try:
        yield
    finally:
        torchs._delay, torchs.get_method_name = delay, name


def waiting(handler: RendezvousHandler) -> bool:
    """Whether nodes wait for the next round, because they failed or join; also if that cannot be learnt."""
    try:
        return handler.num_nodes_waiting() > 0
    except (RendezvousError, RuntimeError):  # the store has gone, with the node that has it
        return True


def stop_heartbeats(handler: RendezvousHandler, timeout: float) -> bool:
    """Stop what torch lets go on after a signal; False if it does not end in ``timeout`` seconds.

    A heartbeat is in C++ most of the time, and perhaps waits there for a store that is gone. A thread that comes back
    from there while Python ends has its stack unwound, which aborts the process.
    """
    if not isinstance(handler, DynamicRendezvousHandler):
        return True
    stopper = threading.Thread(target=handler._stop_heartbeats, name="fastckpt-heartbeats", daemon=True)
    stopper.start()
    stopper.join(timeout)
    return not stopper.is_alive()


def _name_of_caller(depth: int = 2) -> str:
    return sys._getframe(depth).f_code.co_name
