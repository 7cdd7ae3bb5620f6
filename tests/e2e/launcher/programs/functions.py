"""Agents whose workers run functions, as torch's own tests of its agent construct them; prints what became of them."""

import os
import signal
from collections.abc import Callable

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

from fastckpt._core.config import Settings
from fastckpt_run.agent import FastckptAgent


def rank() -> int:
    return int(os.environ["RANK"])


def compute() -> torch.Tensor:
    return torch.full((2, 2), rank())


def add(a: int, b: int) -> int:
    return a + b + rank()


def sad_if_odd() -> None:
    if rank() % 2:
        raise RuntimeError("sad because i throw")


def killed_once() -> int:
    if rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return rank()


def run(function: Callable[..., object], *args: object, max_restarts: int = 0) -> RunResult:
    parameters = RendezvousParameters("c10d", "localhost:0", function.__name__, 1, 1, is_host=True)
    handler = registry.get_rendezvous_handler(parameters)
    spec = WorkerSpec("trainer", 2, handler, entrypoint=function, args=args, max_restarts=max_restarts)
    agent = FastckptAgent(spec, settings=Settings(), logs_specs=DefaultLogsSpecs(), start_method="fork")
    result = agent.run()
    handler.shutdown()
    return result


def main() -> None:
    computed = run(compute).return_values
    print("compute", [computed[0].sum().item(), computed[1].sum().item()])
    print("add", sorted(run(add, 2, 3).return_values.items()))
    sad = run(sad_if_odd)
    print("sad", sad.state.name, [failure.message["message"] for failure in sad.failures.values()])
    print("killed", sorted(run(killed_once, max_restarts=1).return_values.items()))


main()
