"""Rounds of a rendezvous without torch's detours: the same outcome, and torch is left as it was."""

import random
import time

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from fastckpt_run.torchrun_patches import forget_last_round, without_waits


def handler(name: str, most: int) -> DynamicRendezvousHandler:
    store = TCPStore("localhost", 0, is_master=True)
    backend = C10dRendezvousBackend(store, name)
    return DynamicRendezvousHandler.from_backend(name, store, backend, min_nodes=1, max_nodes=most)


def recording() -> str:
    return dynamic_rendezvous.get_method_name()


def caller() -> str:
    return recording()


alone, chance, ports = handler("alone", 1), random.getstate(), set()
for _ in range(3):
    with without_waits(alone):
        forget_last_round(alone)
        found = alone.next_rendezvous()
    assert (found.rank, found.world_size) == (0, 1)
    ports.add(found.bootstrap_store_info.master_port)
assert random.getstate() == chance, "torch has drawn how long to wait"
assert len(ports) == 3, "each round has a store of its own"

before = caller()
with without_waits(alone):
    assert caller() == before == "caller"
assert dynamic_rendezvous._delay.__module__ == "torch.distributed.elastic.rendezvous.utils"
assert dynamic_rendezvous.get_method_name.__module__ == dynamic_rendezvous.__name__

with without_waits(handler("several", 2)):
    dynamic_rendezvous._delay((0.0, 0.001))
    assert random.getstate() != chance, "among several nodes the wait before the first round is torch's"
    begin = time.monotonic()
    for _ in range(50):
        dynamic_rendezvous._delay(seconds=1)
    assert 1.0 <= time.monotonic() - begin < 25.0, "a node looks for the others every 20 ms, not once a second"
alone.shutdown()
print("as it should be")
