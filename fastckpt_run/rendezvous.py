"""Make each rendezvous of a job start without what the last one left in its stores."""

from torch.distributed.elastic.rendezvous import RendezvousHandler
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
