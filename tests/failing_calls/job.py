"""The processes of a job, an agent and two workers, which do what they are told, one thing after the other."""

import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastckpt._core.config import AGENT_VARIABLE, Settings
from fastckpt._core.saver.server import Saver
from fastckpt.ddp import DdpCheckpointer, KeepLatestStepStrategy, StorageType
from fastckpt.errors import FastckptError
from tests.failing_calls import page

DEADLINE = 120.0
"""Seconds for an answer, after which a process counts as hung: each wait of the library is shorter in these jobs."""
DURABLE = 20.0
"""Seconds in which what was saved is to become durable."""
NUMBERS = 40_000
WORLD = 2


class Hung(Exception):
    """A process did not answer."""


class Process:
    """A fork of this process that has a part of a job; what it knows is a dict of functions, by name."""

    def __init__(self, role: str, make: Callable[[], Mapping[str, Callable[..., Any]]], log: Path) -> None:
        self.role = role
        self._log = log
        self._socket, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            self._socket.close()
            self._serve(make, theirs)
        theirs.close()
        self._answers = self._socket.makefile("r")

    def _serve(self, make: Callable[[], Mapping[str, Callable[..., Any]]], orders: socket.socket) -> None:
        """Answer until this process is killed, or nobody asks."""
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=f"{self.role}: %(message)s", force=True)
        try:
            page.be(self.role)
            known = make()
            for line in orders.makefile("r"):
                name, arguments = json.loads(line)
                orders.sendall(json.dumps(_answer(known[name], arguments)).encode() + b"\n")
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def tell(self, name: str, *arguments: Any) -> None:
        """Have it begin; `answer` waits for the end."""
        with contextlib.suppress(BrokenPipeError):  # it has died: that is seen when it does not answer
            self._socket.sendall(json.dumps([name, arguments]).encode() + b"\n")

    def answer(self) -> dict[str, Any]:
        """What came of it: its value, or what it raised; raises Hung."""
        self._socket.settimeout(DEADLINE)
        try:
            line = self._answers.readline()
        except TimeoutError:
            os.kill(self._pid, signal.SIGUSR1)  # its stacks, in the log
            time.sleep(0.2)
            raise Hung(f"{self.role} has not answered for {DEADLINE:g} s") from None
        return dict(json.loads(line)) if line else {"raised": "its end", "text": "it has died", "ours": False}

    def fileno(self) -> int:
        return self._socket.fileno()

    def ask(self, name: str, *arguments: Any) -> dict[str, Any]:
        self.tell(name, *arguments)
        return self.answer()

    def kill(self) -> None:
        """End it as a SIGKILL does, and reap it."""
        self._answers.close()
        self._socket.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _answer(act: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    try:
        return {"value": act(*arguments)}
    except BaseException as error:
        logging.exception("raised")
        names_a_file = isinstance(error, OSError) and error.filename is not None
        ours = names_a_file or isinstance(error, FastckptError | TimeoutError)
        return {"raised": type(error).__name__, "text": str(error), "ours": ours}


def state(step: int) -> dict[str, Any]:
    return {"weights": torch.full((NUMBERS,), float(step)), "step": step}


def own_state(step: int, rank: int) -> dict[str, Any]:
    return {"order": torch.arange(step * 1000 + rank, step * 1000 + rank + 3000), "rank": rank}


def is_right(checkpointer: DdpCheckpointer, loaded: dict[str, Any], rank: int) -> bool:
    """Whether what was loaded is what was saved at its step, bit for bit."""
    step = checkpointer.loaded_step
    if step < 0:
        return not loaded
    own, expected = checkpointer.rank_state, own_state(step, rank)
    same = torch.equal(loaded["weights"], state(step)["weights"]) and loaded["step"] == step
    return same and torch.equal(own["order"], expected["order"]) and own["rank"] == rank


def worker(environment: Mapping[str, str], port: int, generation: str, directory: str) -> dict[str, Any]:
    """What a rank can be told to do."""
    os.environ.update(environment)
    rank = int(environment["RANK"])
    made: list[DdpCheckpointer] = []

    def load() -> dict[str, Any]:
        store = dist.PrefixStore(generation, dist.TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        made.append(DdpCheckpointer(directory, KeepLatestStepStrategy(2, directory)))
        loaded = made[0].load_checkpoint()
        return {"step": made[0].loaded_step, "tier": made[0].loaded_from, "right": is_right(made[0], loaded, rank)}

    def save(step: int, kind: str) -> dict[str, Any]:
        result = made[0].save_checkpoint(
            step, state(step), storage_type=StorageType[kind], rank_state=own_state(step, rank)
        )
        return {"saved": result.saved, "reason": result.reason, "trouble": result.trouble}

    return {
        "load": load,
        "save": save,
        "wait": lambda: made[0].wait_latest_checkpoint(DURABLE),
        "close": lambda: [each.close() for each in made] and None,
    }


def agent(shm: Path) -> dict[str, Any]:
    """What an agent can be told to do."""
    saver = Saver(Settings(shm_dir=str(shm), flush_timeout=DURABLE))
    saver.start()

    def seen() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for coordinator in saver._coordinators.values():
            stats = coordinator.stats()
            ids = {"durable": stats.durable, "memory": stats.memory}
            found = {name: id and id.step for name, id in ids.items()} | {"failure": stats.last_failure}
        return found

    def close() -> dict[str, Any]:
        saver.close()
        return seen() | {"unfinished": saver.unfinished}

    return {
        "address": lambda: saver.address,
        "breakpoint": saver.breakpoint,
        "seen": seen,
        "close": close,
    }


def environment_of(rank: int, address: str, restart: int, shm: Path) -> dict[str, str]:
    """The variables of a worker, as a launcher sets them."""
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": WORLD,
        "LOCAL_WORLD_SIZE": WORLD,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "TORCHELASTIC_RESTART_COUNT": restart,
        AGENT_VARIABLE: address,
        "FASTCKPT_SHM_DIR": shm,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return {name: str(value) for name, value in values.items()}
